// Mixture of experts: router and grouped experts (spec MODELS.md section 8).
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"
#include "math/weight_matrix.h"

namespace hybridge {

// Per token: the top_k experts of sigmoid(gate x) + bias, and their weights from the sigmoid alone.
struct MoeRoute {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t experts = 0;
  std::int64_t top_k = 0;
  bool renormalize = false;
  float scale = 1.0f;
  const float* x = nullptr;            // [T, D]
  WeightMatrix gate_weight;            // [E, D]
  const float* bias = nullptr;         // [E]
  std::int32_t* expert_ids = nullptr;  // [T, k], by descending biased score, ties lowest id
  float* expert_weights = nullptr;     // [T, k]
};

// How expert weights are stored. MXFP4: two elements a byte, the low nibble first, each 32
// elements of a row sharing a scale 2^(s - 127). Packed: bf12 rows (math/packed.h).
enum class WeightFormat { kFloat32, kBfloat16, kMxfp4, kPacked };

// [E, rows, columns] of expert weights.
struct ExpertWeights {
  WeightFormat format = WeightFormat::kFloat32;
  const void* data = nullptr;
  const std::uint8_t* scale = nullptr;  // [E, rows, columns / 32], MXFP4 only
};

enum class Activation { kSilu, kSitu };

// output[t] = sum over j of expert_weights[t, j] * down_e(act(gate_e x_t, up_e x_t)),
// e = expert_ids[t, j], summed in fp32 in the order of j.
struct MoeExperts {
  std::int64_t tokens = 0;
  std::int64_t latent = 0;
  std::int64_t intermediate = 0;
  std::int64_t experts = 0;
  std::int64_t top_k = 0;
  const float* x = nullptr;                  // [T, L]
  const std::int32_t* expert_ids = nullptr;  // [T, k], each within [0, E)
  const float* expert_weights = nullptr;     // [T, k]
  ExpertWeights gate_up;                     // [E, 2I, L], gate rows, then up rows
  ExpertWeights down;                        // [E, L, I]
  Activation activation = Activation::kSitu;
  float beta = 1.0f;
  bool has_linear_beta = false;  // else up is used as it is
  float linear_beta = 1.0f;
  bool round_x = false;     // left sides of many rows may be rounded to bfloat16
  float* output = nullptr;  // [T, L]
};

HYBRIDGE_DECLARE_LEVELS(moe_route, void(const MoeRoute&, const Parallel&))
HYBRIDGE_DECLARE_LEVELS(moe_experts, void(const MoeExperts&, const Parallel&))

}  // namespace hybridge
