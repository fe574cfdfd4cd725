// One token of the KDA recurrence for one head: the form for decode and for very short runs.
#pragma once

#include "math/lanes.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

// One token's vectors for one head. The key-wide ones are padded to whole vectors.
struct KdaToken {
  const float* query;
  const float* key;
  const float* decay;  // exp(g)
  const float* value;
  float beta;
  // Derived by prepare_step:
  float* decayed_query;  // q exp(g)
  float* decayed_key;    // k exp(g)
  float query_dot_key;
};

inline void prepare_step(KdaToken& token, std::int64_t padded_key_dim) {
  Lanes dot = Lanes::zero();
  for (std::int64_t c = 0; c < padded_key_dim; c += kWidth) {
    const Lanes query = Lanes::load(token.query + c);
    const Lanes key = Lanes::load(token.key + c);
    const Lanes decay = Lanes::load(token.decay + c);
    (query * decay).store(token.decayed_query + c);
    (key * decay).store(token.decayed_key + c);
    dot = multiply_add(query, key, dot);
  }
  token.query_dot_key = sum_of(dot);
}

// Columns [0, kColumns * kWidth) of the state, whose rows are `stride` apart. The state is read
// once for both S'(k exp g) and S'(q exp g); the new output is S_new' q = S'(q exp g) + (q.k) d, so
// that the second pass only writes.
template <int kColumns>
inline void step_columns(const KdaToken& token, std::int64_t key_dim, float* state,
                         std::int64_t stride, const float* value, float* output) {
  Lanes seen[kColumns], read[kColumns];
  for (int c = 0; c < kColumns; ++c) seen[c] = read[c] = Lanes::zero();
  const float* row = state;
  for (std::int64_t d = 0; d < key_dim; ++d, row += stride) {
    const Lanes key = Lanes::broadcast(token.decayed_key[d]);
    const Lanes query = Lanes::broadcast(token.decayed_query[d]);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const Lanes old = Lanes::load(row + c * kWidth);
      seen[c] = multiply_add(key, old, seen[c]);
      read[c] = multiply_add(query, old, read[c]);
    }
  }
  Lanes delta[kColumns];
  const Lanes beta = Lanes::broadcast(token.beta);
  const Lanes query_dot_key = Lanes::broadcast(token.query_dot_key);
#pragma GCC unroll 8
  for (int c = 0; c < kColumns; ++c) {
    delta[c] = beta * (Lanes::load(value + c * kWidth) - seen[c]);
    multiply_add(query_dot_key, delta[c], read[c]).store(output + c * kWidth);
  }
  float* to = state;
  for (std::int64_t d = 0; d < key_dim; ++d, to += stride) {
    const Lanes decay = Lanes::broadcast(token.decay[d]);
    const Lanes key = Lanes::broadcast(token.key[d]);
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const Lanes kept = decay * Lanes::load(to + c * kWidth);
      multiply_add(key, delta[c], kept).store(to + c * kWidth);
    }
  }
}

// The same for fewer columns than a vector holds.
inline void step_tail(const KdaToken& token, std::int64_t key_dim, float* state,
                      std::int64_t stride, const float* value, float* output,
                      std::int64_t columns) {
  Lanes seen = Lanes::zero(), read = Lanes::zero();
  for (std::int64_t d = 0; d < key_dim; ++d) {
    const Lanes old = load_first(state + d * stride, columns);
    seen = multiply_add(Lanes::broadcast(token.decayed_key[d]), old, seen);
    read = multiply_add(Lanes::broadcast(token.decayed_query[d]), old, read);
  }
  const Lanes delta = Lanes::broadcast(token.beta) * (load_first(value, columns) - seen);
  store_first(output, multiply_add(Lanes::broadcast(token.query_dot_key), delta, read), columns);
  for (std::int64_t d = 0; d < key_dim; ++d) {
    float* row = state + d * stride;
    const Lanes kept = Lanes::broadcast(token.decay[d]) * load_first(row, columns);
    store_first(row, multiply_add(Lanes::broadcast(token.key[d]), delta, kept), columns);
  }
}

// state [key_dim, value_dim] with rows `stride` apart is updated in place; output [value_dim].
inline void kda_step(const KdaToken& token, std::int64_t key_dim, std::int64_t value_dim,
                     float* state, std::int64_t stride, float* output) {
  // Whole rows at a time where the registers allow: the state is then read in address order.
  constexpr int kWide = kRowTile;
  std::int64_t column = 0;
  for (; column + kWide * kWidth <= value_dim; column += kWide * kWidth) {
    step_columns<kWide>(token, key_dim, state + column, stride, token.value + column,
                        output + column);
  }
  for (; column + kWidth <= value_dim; column += kWidth) {
    step_columns<1>(token, key_dim, state + column, stride, token.value + column, output + column);
  }
  if (column < value_dim) {
    step_tail(token, key_dim, state + column, stride, token.value + column, output + column,
              value_dim - column);
  }
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
