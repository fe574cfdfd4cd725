#include "math/attn_res.h"

#include "math/lanes.h"
#include "math/scratch.h"

namespace hybridge {
namespace HYBRIDGE_ISA {
namespace {

// Query sites that one pass over a token's sources serves.
constexpr std::int64_t kSites = 4;

// 1 / sqrt(mean(v^2) + eps)
float inverse_rms(float squares, std::int64_t count, float eps) {
  return 1.0f / std::sqrt(squares / static_cast<float>(count) + eps);
}

// The sites [first, first + count) of one token. `weights` holds [sources, kSites] scores.
void prepare_sites(const AttnResPrepare& args, std::int64_t token, std::int64_t first,
                   std::int64_t count, float* weights) {
  const std::int64_t width = args.hidden;
  const float* query[kSites];
  for (std::int64_t q = 0; q < kSites; ++q) {
    query[q] = args.queries + (first + (q < count ? q : 0)) * width;
  }
  for (std::int64_t i = 0; i < args.sources; ++i) {
    const float* value = args.values + (i * args.tokens + token) * width;
    Lanes squares = Lanes::zero();
    Lanes dots[kSites];
    for (Lanes& dot : dots) dot = Lanes::zero();
    for (std::int64_t c = 0; c < width; c += kWidth) {
      const Lanes v = load_first_or_all(value + c, width - c);
      squares = multiply_add(v, v, squares);
      for (std::int64_t q = 0; q < kSites; ++q) {
        dots[q] = multiply_add(v, load_first_or_all(query[q] + c, width - c), dots[q]);
      }
    }
    const float scale = inverse_rms(sum_of(squares), width, args.eps);
    for (std::int64_t q = 0; q < kSites; ++q) weights[i * kSites + q] = sum_of(dots[q]) * scale;
  }

  for (std::int64_t q = 0; q < count; ++q) {
    float largest = weights[q];
    for (std::int64_t i = 1; i < args.sources; ++i) {
      const float score = weights[i * kSites + q];
      largest = score > largest ? score : largest;
    }
    float sum = 0.0f;
    for (std::int64_t i = 0; i < args.sources; ++i) {
      float& weight = weights[i * kSites + q];
      weight = std::exp(weight - largest);
      sum += weight;
    }
    args.logit_max[(first + q) * args.tokens + token] = largest;
    args.exp_sum[(first + q) * args.tokens + token] = sum;
  }

  for (std::int64_t c = 0; c < width; c += kWidth) {
    Lanes sums[kSites];
    for (Lanes& sum : sums) sum = Lanes::zero();
    for (std::int64_t i = 0; i < args.sources; ++i) {
      const float* value = args.values + (i * args.tokens + token) * width + c;
      const Lanes v = load_first_or_all(value, width - c);
      for (std::int64_t q = 0; q < kSites; ++q) {
        sums[q] = multiply_add(Lanes::broadcast(weights[i * kSites + q]), v, sums[q]);
      }
    }
    for (std::int64_t q = 0; q < count; ++q) {
      float* to = args.numerator + ((first + q) * args.tokens + token) * width + c;
      store_first_or_all(to, sums[q], width - c);
    }
  }
}

// The live prefix's score. With a delta, the sum is stored first; returns what was scored.
const float* score_prefix(const AttnResUpdate& args, std::int64_t token, float& score) {
  const std::int64_t width = args.hidden;
  const float* prefix = args.prefix + token * width;
  const float* delta = args.delta ? args.delta + token * width : nullptr;
  float* sum = args.delta ? args.new_prefix + token * width : nullptr;
  Lanes squares = Lanes::zero();
  Lanes dot = Lanes::zero();
  for (std::int64_t c = 0; c < width; c += kWidth) {
    Lanes v = load_first_or_all(prefix + c, width - c);
    if (delta) {
      v = v + load_first_or_all(delta + c, width - c);
      store_first_or_all(sum + c, v, width - c);
    }
    squares = multiply_add(v, v, squares);
    dot = multiply_add(v, load_first_or_all(args.query + c, width - c), dot);
  }
  score = sum_of(dot) * inverse_rms(sum_of(squares), width, args.eps);
  return sum ? sum : prefix;
}

template <class Weight>
void scale_row(float* row, std::int64_t width, float factor, const Weight* weight) {
  const Lanes scale = Lanes::broadcast(factor);
  std::int64_t c = 0;
  for (; c + kWidth <= width; c += kWidth) {
    (Lanes::load(row + c) * scale * load_lanes(weight + c)).store(row + c);
  }
  for (; c < width; ++c) row[c] *= factor * load_scalar(weight + c);
}

// A token's rows stay in the core's cache from the first loop to the last.
void update_token(const AttnResUpdate& args, std::int64_t token) {
  const std::int64_t width = args.hidden;
  const float* numerator = args.numerator + token * width;
  float* output = args.output + token * width;
  float score = 0.0f;
  const float* prefix = score_prefix(args, token, score);
  const float before = args.logit_max[token];
  const float largest = score > before ? score : before;
  const float frozen = std::exp(before - largest);
  const float live = std::exp(score - largest);
  const float total = args.exp_sum[token] * frozen + live;
  const Lanes keep = Lanes::broadcast(frozen / total);
  const Lanes add = Lanes::broadcast(live / total);
  Lanes squares = Lanes::zero();
  for (std::int64_t c = 0; c < width; c += kWidth) {
    const Lanes kept = keep * load_first_or_all(numerator + c, width - c);
    const Lanes v = load_first_or_all(prefix + c, width - c);
    const Lanes mixed = multiply_add(add, v, kept);
    squares = multiply_add(mixed, mixed, squares);
    store_first_or_all(output + c, mixed, width - c);
  }
  if (!args.norm_weight) return;
  const float factor = inverse_rms(sum_of(squares), width, args.norm_eps);
  if (args.norm_weight_bf16) {
    return scale_row(output, width, factor, static_cast<const std::uint16_t*>(args.norm_weight));
  }
  scale_row(output, width, factor, static_cast<const float*>(args.norm_weight));
}

}  // namespace

void attn_res_prepare(const AttnResPrepare& args, const Parallel& parallel) {
  const std::int64_t groups = (args.sites + kSites - 1) / kSites;
  parallel_for(parallel, static_cast<std::size_t>(args.tokens * groups), [&](std::size_t index) {
    const std::int64_t task = static_cast<std::int64_t>(index);
    const std::int64_t first = task % groups * kSites;
    const std::int64_t left = args.sites - first;
    const auto bytes = sizeof(float) * static_cast<std::size_t>(args.sources * kSites);
    float* weights = static_cast<float*>(scratch_bytes(ScratchSlot::kTask, bytes));
    prepare_sites(args, task / groups, first, left < kSites ? left : kSites, weights);
  });
}

void attn_res_update(const AttnResUpdate& args, const Parallel& parallel) {
  // A few tokens are done sooner than another thread wakes.
  const std::int64_t per_task = 1 + (std::int64_t{1} << 15) / (args.hidden > 0 ? args.hidden : 1);
  const std::int64_t tasks = (args.tokens + per_task - 1) / per_task;
  parallel_for(parallel, static_cast<std::size_t>(tasks), [&](std::size_t index) {
    const std::int64_t first = static_cast<std::int64_t>(index) * per_task;
    for (std::int64_t t = first; t < first + per_task && t < args.tokens; ++t) {
      update_token(args, t);
    }
  });
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
