// out = x weight^T, with the weight used as it lies in memory.
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"
#include "math/weight_matrix.h"

namespace hybridge {

struct LinearArgs {
  const float* x;       // [rows, inputs]
  WeightMatrix weight;  // [outputs, inputs]
  float* out;           // [rows, outputs]
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
  bool round_x;  // x may be rounded where the weight is bfloat16, packed or not
};

// Sums are float32. x is used exactly, except with round_x, a bfloat16 or packed weight, more than
// four rows and a machine that multiplies bfloat16 pairs: then it is rounded to bfloat16 (relative
// error at most 2^-8).
HYBRIDGE_DECLARE_LEVELS(linear, void(const LinearArgs&, const Parallel&))

}  // namespace hybridge
