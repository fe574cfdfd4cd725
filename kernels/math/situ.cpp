#include "math/situ.h"

#include <algorithm>

#include "math/lanes.h"

namespace hybridge::HYBRIDGE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 13;

// beta tanh(x / beta): near the identity for small x, within +-beta always.
Lanes soft_clamp(Lanes x, float beta) {
  return Lanes::broadcast(beta) * hyperbolic_tangent(x / Lanes::broadcast(beta));
}

void activate(const SituArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, end - i);
    const Lanes gate = load_lanes(args.gate + i, count);
    Lanes up = load_lanes(args.up + i, count);
    if (args.linear_beta > 0) up = soft_clamp(up, args.linear_beta);
    store_first(args.out + i, soft_clamp(gate, args.beta) * sigmoid(gate) * up, count);
  }
}

}  // namespace

void situ(const SituArgs& args, const Parallel& parallel) {
  const int64_t tasks = (args.count + kTaskElements - 1) / kTaskElements;
  parallel_for(parallel, static_cast<size_t>(tasks), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * kTaskElements;
    activate(args, begin, std::min(args.count, begin + kTaskElements));
  });
}

}  // namespace hybridge::HYBRIDGE_ISA
