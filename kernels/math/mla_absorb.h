// The two products that absorbed MLA makes of kv_b_proj's weight, which is read as it lies: a
// head's rows stand together, first the `nope` rows W_UK that make its keys of a latent row, then
// the `value_dim` rows W_UV that make its values.
//   mla_absorb_query   out[t, h, c] = sum_n x[t, h, n] W_UK[h, n, c]
//   mla_expand_value   out[t, h, v] = sum_c x[t, h, c] W_UV[h, v, c]
#pragma once

#include <cstdint>

#include "math/levels.h"
#include "math/parallel.h"

namespace hybridge {

struct MlaAbsorbArgs {
  const float* x;      // [tokens, heads, rows or columns]
  const void* weight;  // [heads * head_rows, columns]
  bool weight_bf16;
  float* out;  // [tokens, heads, columns or rows]
  int64_t tokens;
  int64_t heads;
  int64_t head_rows;  // of the weight, all of a head's
  int64_t columns;
  int64_t first_row;  // of a head's rows, those that take part
  int64_t rows;
  bool round_x;  // x may be rounded where the weight is bfloat16
};

// Sums are float32. x is used exactly, except with round_x, a bfloat16 weight, more than 8 tokens
// and a machine that multiplies bfloat16 pairs: then it is rounded to bfloat16 (2^-8 relative).
HYBRIDGE_DECLARE_LEVELS(mla_absorb_query, void(const MlaAbsorbArgs&, const Parallel&))
HYBRIDGE_DECLARE_LEVELS(mla_expand_value, void(const MlaAbsorbArgs&, const Parallel&))

}  // namespace hybridge
