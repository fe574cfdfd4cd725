// out = x weight^T, with the weight used as it lies in memory.
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"

namespace hybridge {

struct LinearArgs {
  const float* x;      // [rows, inputs]
  const void* weight;  // [outputs, inputs]
  bool weight_bf16;
  float* out;  // [rows, outputs]
  int64_t rows;
  int64_t inputs;
  int64_t outputs;
};

// Few rows: x and the sums are float32 exactly. Many rows with a bfloat16 weight on a machine that
// multiplies bfloat16 pairs: x is rounded to bfloat16 once (relative error at most 2^-8 a factor),
// sums stay float32.
HYBRIDGE_DECLARE_LEVELS(linear, void(const LinearArgs&, const Parallel&))

}  // namespace hybridge
