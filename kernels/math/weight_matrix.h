// A weight matrix in the precision it shipped in.
#pragma once

namespace hybridge {

struct WeightMatrix {
  const void* data = nullptr;  // row-major, fp32, bfloat16 or bf12 rows (math/packed.h)
  bool is_bf16 = false;
  bool is_packed = false;
};

}  // namespace hybridge
