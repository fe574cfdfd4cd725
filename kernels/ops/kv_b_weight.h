// What the operators on kv_b_proj's weight check of it.
#pragma once

#include "framework/op.h"

namespace hybridge {

// The rows that each head of x [T, H, ...] has; at least `least` of them, which are `meaning`.
inline int64_t check_kv_b_rows(const Tensor& weight, const Tensor& x, int64_t least,
                               const char* meaning) {
  weight.expect_rank(2, "[H * (nope + value), C]");
  const int64_t heads = x.dim(1);
  if (heads < 1) x.fail("it has no heads", "pass at least one");
  if (weight.dim(0) % heads != 0) {
    weight.fail(
        text("its ", weight.dim(0), " rows are no whole number for each of ", heads, " heads"),
        "pass all rows of all heads, head after head");
  }
  const int64_t rows = weight.dim(0) / heads;
  if (rows < least) {
    weight.fail(text("it has ", rows, " rows a head, fewer than ", least, ", the ", meaning),
                "pass a head's key rows and then its value rows");
  }
  return rows;
}

}  // namespace hybridge
