#include "math/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "math/lanes.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 15;

float mean_square(const float* x, int64_t width) {
  Lanes even = Lanes::zero();
  Lanes odd = Lanes::zero();
  int64_t i = 0;
  for (; i + 2 * kWidth <= width; i += 2 * kWidth) {
    const Lanes a = Lanes::load(x + i);
    const Lanes b = Lanes::load(x + i + kWidth);
    even = multiply_add(a, a, even);
    odd = multiply_add(b, b, odd);
  }
  for (; i < width; i += kWidth) {
    const Lanes a = load_lanes(x + i, std::min<int64_t>(kWidth, width - i));
    even = multiply_add(a, a, even);
  }
  return sum_of(even + odd) / static_cast<float>(width);
}

template <class Weight>
void normalise_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const Weight* weight = static_cast<const Weight*>(args.weight);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = args.x + row * args.width;
    float* out = args.out + row * args.width;
    const float factor = 1.0f / std::sqrt(mean_square(x, args.width) + args.eps);
    const Lanes scale = Lanes::broadcast(factor);
    int64_t i = 0;
    for (; i + kWidth <= args.width; i += kWidth) {
      (Lanes::load(x + i) * scale * load_lanes(weight + i)).store(out + i);
    }
    for (; i < args.width; ++i) out[i] = x[i] * factor * load_scalar(weight + i);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& args, const Parallel& parallel) {
  if (args.width == 0) return;
  const int64_t per_task = std::max<int64_t>(1, kTaskElements / args.width);
  const int64_t tasks = (args.rows + per_task - 1) / per_task;
  parallel_for(parallel, static_cast<size_t>(tasks), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * per_task;
    const int64_t end = std::min(args.rows, begin + per_task);
    if (args.weight_bf16) return normalise_rows<uint16_t>(args, begin, end);
    return normalise_rows<float>(args, begin, end);
  });
}

}  // namespace hybridge::HYBRIDGE_ISA
