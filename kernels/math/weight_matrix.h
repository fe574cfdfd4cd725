// A weight matrix in the precision it shipped in.
#pragma once

namespace hybridge {

struct WeightMatrix {
  const void* data = nullptr;  // row-major, fp32 or bfloat16
  bool is_bf16 = false;
};

}  // namespace hybridge
