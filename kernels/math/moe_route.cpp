#include "math/lanes.h"
#include "math/linear.h"
#include "math/moe.h"
#include "math/scratch.h"

namespace hybridge {
namespace HYBRIDGE_ISA {
namespace {

constexpr float kRenormaliseEpsilon = 1e-20f;
constexpr std::int64_t kTokensPerTask = 16;

// scores <- sigmoid(scores), in place over one token's experts.
void apply_sigmoid(float* scores, std::int64_t count) {
  for (std::int64_t e = 0; e < count; e += kWidth) {
    store_first_or_all(scores + e, sigmoid(load_first_or_all(scores + e, count - e)), count - e);
  }
}

// Keeps the best `top_k` seen so far in descending order. An expert enters behind equal ones, so
// that ties go to the lowest id; a NaN key counts as the lowest of all, so that ids are always
// top_k different experts.
void choose(const MoeRoute& args, const float* scores, std::int32_t* ids, float* keys) {
  std::int64_t chosen = 0;
  for (std::int64_t e = 0; e < args.experts; ++e) {
    float key = scores[e] + args.bias[e];
    if (key != key) key = -INFINITY;
    if (chosen == args.top_k && !(key > keys[chosen - 1])) continue;
    std::int64_t place = chosen < args.top_k ? chosen++ : chosen - 1;
    for (; place > 0 && key > keys[place - 1]; --place) {
      keys[place] = keys[place - 1];
      ids[place] = ids[place - 1];
    }
    keys[place] = key;
    ids[place] = static_cast<std::int32_t>(e);
  }
}

void weigh(const MoeRoute& args, const float* scores, const std::int32_t* ids, float* weights) {
  float sum = 0.0f;
  for (std::int64_t j = 0; j < args.top_k; ++j) {
    weights[j] = scores[ids[j]];
    sum += weights[j];
  }
  const float factor = args.renormalize ? args.scale / (sum + kRenormaliseEpsilon) : args.scale;
  for (std::int64_t j = 0; j < args.top_k; ++j) weights[j] *= factor;
}

}  // namespace

void moe_route(const MoeRoute& args, const Parallel& parallel) {
  ScratchArena measure;
  measure.take<float>(static_cast<std::size_t>(args.tokens * args.experts));
  ScratchArena arena(scratch_bytes(ScratchSlot::kOperator, measure.used()));
  float* scores = arena.take<float>(static_cast<std::size_t>(args.tokens * args.experts));
  constexpr bool kRoundX = false;  // a rounded score could choose another expert
  linear({args.x, args.gate_weight, scores, args.tokens, args.hidden, args.experts, kRoundX},
         parallel);

  const std::int64_t tasks = (args.tokens + kTokensPerTask - 1) / kTokensPerTask;
  parallel_for(parallel, static_cast<std::size_t>(tasks), [&](std::size_t task) {
    const auto keys_bytes = sizeof(float) * static_cast<std::size_t>(args.top_k);
    float* keys = static_cast<float*>(scratch_bytes(ScratchSlot::kTask, keys_bytes));
    const std::int64_t first = static_cast<std::int64_t>(task) * kTokensPerTask;
    for (std::int64_t t = first; t < first + kTokensPerTask && t < args.tokens; ++t) {
      float* row = scores + t * args.experts;
      std::int32_t* ids = args.expert_ids + t * args.top_k;
      apply_sigmoid(row, args.experts);
      choose(args, row, ids, keys);
      weigh(args, row, ids, args.expert_weights + t * args.top_k);
    }
  });
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
