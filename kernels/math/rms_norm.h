// out = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32.
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"

namespace hybridge {

struct RmsNormArgs {
  const float* x;      // [rows, width]
  const void* weight;  // [width]
  bool weight_bf16;
  float* out;  // [rows, width]
  int64_t rows;
  int64_t width;
  float eps;
};

HYBRIDGE_DECLARE_LEVELS(rms_norm, void(const RmsNormArgs&, const Parallel&))

}  // namespace hybridge
