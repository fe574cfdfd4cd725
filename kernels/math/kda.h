// Kimi Delta Attention: arguments and entry points of the CPU kernels (spec MODELS.md section 3).
//
// Per head, with state S [key, value] in fp32 and S = 0 before the first token:
//   S <- diag(exp(g_t)) S;   d = beta_t (v_t - S' k_t);   S <- S + k_t d';   o_t = S' q_t
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"
#include "math/weight_matrix.h"

namespace hybridge {

// A ragged batch: sequence b owns the tokens [query_start[b], query_start[b + 1]) and the state
// `state_slot[b]` (-1: no state, outputs 0). The caller has checked every index.
struct KdaBatch {
  std::int64_t tokens = 0;
  std::int64_t sequences = 0;
  std::int64_t heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  const std::int32_t* query_start = nullptr;
  const std::int32_t* context_len = nullptr;  // 0: start from a zero state
  const std::int32_t* state_slot = nullptr;
};

struct KdaRecurrence {
  KdaBatch batch;
  const float* query = nullptr;      // [T, H, K], normalised and scaled
  const float* key = nullptr;        // [T, H, K], normalised
  const float* value = nullptr;      // [T, H, V]
  const float* log_decay = nullptr;  // [T, H, K], g
  const float* beta = nullptr;       // [T, H], after the sigmoid
  float* state = nullptr;            // [slots, H, K, V], updated in place
  float* output = nullptr;           // [T, H, V]
};

// What turns raw projections into the recurrence's inputs.
struct KdaGate {
  std::int64_t conv_width = 0;
  const float* conv_weight = nullptr;  // [3P, W], q|k|v, the last tap is the current token
  const float* a_log = nullptr;        // [H]
  const float* dt_bias = nullptr;      // [P]
  bool has_lower_bound = false;        // else g = -exp(A) softplus(z)
  float lower_bound = 0.0f;            // g = lower_bound sigmoid(exp(A) z)
};

struct KdaPrefill {
  KdaBatch batch;
  KdaGate gate;
  const float* qkv = nullptr;    // [T, 3P], raw projections
  const float* decay = nullptr;  // [T, P], f_b f_a x without dt_bias
  const float* beta = nullptr;   // [T, H], before the sigmoid
  float* conv_state = nullptr;   // [slots, 3P, W - 1], raw, newest last; updated in place
  float* state = nullptr;        // [slots, H, K, V], updated in place
  float* output = nullptr;       // [T, H, V]
};

struct KdaDecode {
  KdaBatch batch;  // tokens == sequences, query_start unused
  KdaGate gate;
  std::int64_t hidden = 0;
  std::int64_t rank = 0;       // of the decay's low-rank projection
  std::int64_t gate_rank = 0;  // of the output gate's; 0: full rank, its rows are in in_weight
  const float* x = nullptr;    // [B, D]
  WeightMatrix in_weight;      // [3P + rank + H + (gate_rank or P), D]
  WeightMatrix f_b_weight;     // [P, rank]
  WeightMatrix g_b_weight;     // [P, gate_rank]
  WeightMatrix o_weight;       // [D, P]
  const float* norm_weight = nullptr;  // [V]
  float norm_eps = 0.0f;
  bool round_x = false;  // the two large products may round their left sides (math/linear.h)
  float* conv_state = nullptr;
  float* state = nullptr;
  float* output = nullptr;  // [B, D]
};

HYBRIDGE_DECLARE_LEVELS(kda_recurrence, void(const KdaRecurrence&, const Parallel&))
HYBRIDGE_DECLARE_LEVELS(kda_prefill, void(const KdaPrefill&, const Parallel&))
HYBRIDGE_DECLARE_LEVELS(kda_decode, void(const KdaDecode&, const Parallel&))

}  // namespace hybridge
