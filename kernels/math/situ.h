// SiTU: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta).
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"

namespace hybridge {

struct SituArgs {
  const float* gate;  // [count]
  const float* up;    // [count]
  float* out;         // [count]
  int64_t count;
  float beta;
  float linear_beta;  // 0: `up` is used as it is
};

HYBRIDGE_DECLARE_LEVELS(situ, void(const SituArgs&, const Parallel&))

}  // namespace hybridge
