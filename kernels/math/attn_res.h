// Attention residuals over depth in two stages (spec MODELS.md 6.3), all in fp32.
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"

namespace hybridge {

// Stage one: the frozen sources of a block against all query sites of that block.
//   s_i = q . v_i / rms(v_i);  logit_max = max s_i;  exp_sum = sum exp(s_i - logit_max);
//   numerator = sum exp(s_i - logit_max) v_i
struct AttnResPrepare {
  std::int64_t sources = 0;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t sites = 0;
  float eps = 0.0f;
  const float* values = nullptr;   // [n, T, D]
  const float* queries = nullptr;  // [S, D]
  float* numerator = nullptr;      // [S, T, D]
  float* logit_max = nullptr;      // [S, T]
  float* exp_sum = nullptr;        // [S, T]
};

// Stage two: merges the live prefix into one site's statistics by online softmax.
//   with delta:       p = prefix + delta, stored; otherwise p = prefix
//   h = (numerator exp(logit_max - m) + p exp(s - m)) / (exp_sum exp(logit_max - m) + exp(s - m))
//   with norm_weight: h / sqrt(mean(h^2) + norm_eps) * norm_weight instead of h
struct AttnResUpdate {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  float eps = 0.0f;
  const float* prefix = nullptr;      // [T, D]
  const float* query = nullptr;       // [D]
  const float* numerator = nullptr;   // [T, D]
  const float* logit_max = nullptr;   // [T]
  const float* exp_sum = nullptr;     // [T]
  float* output = nullptr;            // [T, D]
  const float* delta = nullptr;       // [T, D] or absent
  float* new_prefix = nullptr;        // [T, D], with delta
  const void* norm_weight = nullptr;  // [D] or absent
  bool norm_weight_bf16 = false;
  float norm_eps = 0.0f;
};

HYBRIDGE_DECLARE_LEVELS(attn_res_prepare, void(const AttnResPrepare&, const Parallel&))
HYBRIDGE_DECLARE_LEVELS(attn_res_update, void(const AttnResUpdate&, const Parallel&))

}  // namespace hybridge
