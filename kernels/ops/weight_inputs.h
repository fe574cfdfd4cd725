// Weights in any form that the products read, and checks of those in bf12 rows (math/packed.h).
#pragma once

#include "framework/op.h"
#include "math/weight_matrix.h"

namespace hybridge {

inline WeightMatrix weight_matrix(const Tensor& weight) {
  return {weight.raw(), weight.is_bf16(), weight.dtype() == DType::u8};
}

constexpr int64_t kPackedColumnBlock = 128;  // columns a block holds
constexpr int64_t kMostPackedColumns = int64_t{1} << 16;

// Raises OpError unless the last dimension holds packed rows of `columns` columns.
inline void expect_packed_rows(const Tensor& weight, int64_t columns) {
  if (columns < 1 || columns > kMostPackedColumns || columns % kPackedColumnBlock != 0) {
    weight.fail(text("its rows would have ", columns, " columns"),
                "packed rows have a multiple of 128 columns, at most 65536");
  }
  const int64_t bytes = columns / kPackedColumnBlock * 192 + 64;
  weight.expect_dim(weight.rank() - 1, bytes, "bytes of a packed row");
}

}  // namespace hybridge
