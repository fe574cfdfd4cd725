// Up to 16 tokens of the KDA recurrence for one head at once (spec MODELS.md 3.2).
//
// With D the cumulative log decay relative to the chunk's middle token m, the decay between two
// tokens factors into exp(D_i) exp(-D_j), and 16 tokens become small matrix products. Both factors
// stay finite while |D| <= kMaxExponent. Decays that are stronger (variant A of the gate has no
// bound) make the chunk shorter, down to single tokens, which need no such factors. So every
// exponent is safe, whatever the input.
#pragma once

#include "math/kda_step.h"
#include "math/scratch.h"
#include "math/tiles.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr int kChunk = 16;
// exp(60) = 1.1e26: products of two such factors with keys up to 1e5 stay within fp32.
constexpr float kMaxExponent = 60.0f;
constexpr int kMinChunk = 4;                 // fewer tokens are cheaper one by one
constexpr std::int64_t kBlock = 2 * kWidth;  // state columns that one tile covers

// Rows of the tokens at hand, filled by the caller, and everything that a chunk derives from them.
// All widths are padded with zeros: key-wide to 16, value-wide to kBlock.
struct KdaScratch {
  std::int64_t key_dim, value_dim;        // as in the model
  std::int64_t key_stride, value_stride;  // padded

  float *query, *key, *log_decay;  // [16, key_stride]
  float* value;                    // [16, value_stride]
  float* beta;                     // [16]
  float* output;                   // [16, value_stride]
  float* state;                    // [key_stride, value_stride]

  float* exponent;        // [16, key_stride]: D
  float* lead_rows;       // [16, key_stride]: k, then q, times exp(D)
  float* inverse_rows;    // [16, key_stride]: k exp(-D)
  float* final_rows;      // [16, key_stride]: k exp(D_last - D)
  float* pair;            // [key_stride, 32]: (k | q) exp(D), channel-major
  float* carried;         // [key_stride, 32]: the same relative to the chunk's start
  float* inverse;         // [key_stride, 16]: k exp(-D), channel-major
  float* middle_decay;    // [key_stride]: exp of the decay from the start through token m
  float* full_decay;      // [key_stride]: exp of the whole chunk's decay
  float* key_products;    // [16 i, 16 j]: Akk
  float* query_products;  // [16 j, 16 i]: Aqk transposed
  float* block;           // [32, kBlock]: (k | q) times the state
  float* delta;           // [16, kBlock]: d of the recurrence
};

inline KdaScratch take_kda_scratch(ScratchArena& arena, std::int64_t key_dim,
                                   std::int64_t value_dim) {
  KdaScratch s = {};
  s.key_dim = key_dim;
  s.value_dim = value_dim;
  s.key_stride = round_up(key_dim, 16);
  s.value_stride = round_up(value_dim, kBlock);
  const auto key_rows = static_cast<std::size_t>(kChunk * s.key_stride);
  const auto value_rows = static_cast<std::size_t>(kChunk * s.value_stride);
  float** const key_wide[] = {&s.query,     &s.key,          &s.log_decay,  &s.exponent,
                              &s.lead_rows, &s.inverse_rows, &s.final_rows, &s.inverse};
  for (float** rows : key_wide) *rows = arena.take<float>(key_rows);
  s.value = arena.take<float>(value_rows);
  s.output = arena.take<float>(value_rows);
  s.beta = arena.take<float>(kChunk);
  s.state = arena.take<float>(static_cast<std::size_t>(s.key_stride * s.value_stride));
  s.pair = arena.take<float>(2 * key_rows);
  s.carried = arena.take<float>(2 * key_rows);
  s.middle_decay = arena.take<float>(static_cast<std::size_t>(s.key_stride));
  s.full_decay = arena.take<float>(static_cast<std::size_t>(s.key_stride));
  s.key_products = arena.take<float>(kChunk * kChunk);
  s.query_products = arena.take<float>(kChunk * kChunk);
  s.block = arena.take<float>(2 * kChunk * kBlock);
  s.delta = arena.take<float>(kChunk * kBlock);
  return s;
}

// Zeroes what is padding in the token rows and stays so.
inline void clear_kda_rows(const KdaScratch& s) {
  const auto key_bytes = sizeof(float) * static_cast<std::size_t>(kChunk * s.key_stride);
  std::memset(s.query, 0, key_bytes);
  std::memset(s.key, 0, key_bytes);
  std::memset(s.log_decay, 0, key_bytes);
  std::memset(s.value, 0, sizeof(float) * static_cast<std::size_t>(kChunk * s.value_stride));
}

// A head's state into its padded copy; a null `from` stands for zeros.
inline void load_state(const KdaScratch& s, const float* from) {
  std::memset(s.state, 0, sizeof(float) * static_cast<std::size_t>(s.key_stride * s.value_stride));
  if (from == nullptr) return;
  for (std::int64_t d = 0; d < s.key_dim; ++d) {
    std::memcpy(s.state + d * s.value_stride, from + d * s.value_dim,
                sizeof(float) * static_cast<std::size_t>(s.value_dim));
  }
}

inline void store_state(const KdaScratch& s, float* to) {
  for (std::int64_t d = 0; d < s.key_dim; ++d) {
    std::memcpy(to + d * s.value_dim, s.state + d * s.value_stride,
                sizeof(float) * static_cast<std::size_t>(s.value_dim));
  }
}

// Fills `exponent` for tokens [first, first + count) and says whether all of them are within
// bounds. The comparison is written so that NaN is out of bounds too.
inline bool relative_exponents(const KdaScratch& s, std::int64_t first, int count) {
  const int middle = count / 2;
  Lanes largest = Lanes::zero();
  Lanes poison = Lanes::zero();  // NaN as soon as one sum is: maximum() would forget it
  for (std::int64_t c = 0; c < s.key_stride; c += kWidth) {
    const float* decay = s.log_decay + first * s.key_stride + c;
    float* exponent = s.exponent + c;
    Lanes sum = Lanes::zero();
    sum.store(exponent + middle * s.key_stride);
    for (int i = middle + 1; i < count; ++i) {
      sum = sum + Lanes::load(decay + i * s.key_stride);
      sum.store(exponent + i * s.key_stride);
      largest = maximum(largest, absolute(sum));
    }
    poison = multiply_add(sum, Lanes::zero(), poison);
    sum = Lanes::zero();
    for (int i = middle; i > 0; --i) {
      sum = sum - Lanes::load(decay + i * s.key_stride);
      sum.store(exponent + (i - 1) * s.key_stride);
      largest = maximum(largest, absolute(sum));
    }
    poison = multiply_add(sum, Lanes::zero(), poison);
  }
  float lanes[kWidth];
  (largest + poison).store(lanes);
  bool within = true;
  for (float lane : lanes) within = within && lane <= kMaxExponent;
  return within;
}

// exp(G_m) and exp(G_last), G counted from the state that enters the chunk.
inline void chunk_decays(const KdaScratch& s, std::int64_t first, int count) {
  for (std::int64_t c = 0; c < s.key_stride; c += kWidth) {
    Lanes sum = Lanes::zero();
    for (int i = 0; i <= count / 2; ++i) {
      sum = sum + Lanes::load(s.log_decay + (first + i) * s.key_stride + c);
    }
    exponential(sum).store(s.middle_decay + c);
    const Lanes last = Lanes::load(s.exponent + (count - 1) * s.key_stride + c);
    exponential(sum + last).store(s.full_decay + c);
  }
}

// (k | q) exp(D), k exp(-D) and k exp(D_last - D), the first three also channel-major. Rows beyond
// `count` are zero and so drop out of every product.
inline void scale_rows(const KdaScratch& s, std::int64_t first, int count) {
  const std::int64_t stride = s.key_stride;
  const auto unused = sizeof(float) * static_cast<std::size_t>((kChunk - count) * stride);
  std::memset(s.inverse_rows + count * stride, 0, unused);
  std::memset(s.final_rows + count * stride, 0, unused);
  std::memset(s.lead_rows + count * stride, 0, unused);
  const float* last = s.exponent + (count - 1) * stride;
  const Lanes one = Lanes::broadcast(1.0f);
  for (std::int64_t c = 0; c < stride; c += kWidth) {
    const Lanes last_factor = exponential(Lanes::load(last + c));
    for (int i = 0; i < count; ++i) {
      const std::int64_t at = i * stride + c;
      const Lanes key = Lanes::load(s.key + first * stride + at);
      const Lanes factor = exponential(Lanes::load(s.exponent + at));
      const Lanes inverse = key * (one / factor);
      (key * factor).store(s.lead_rows + at);
      inverse.store(s.inverse_rows + at);
      (inverse * last_factor).store(s.final_rows + at);
      factor.store(s.exponent + at);
    }
  }
  transpose_16_rows(s.inverse_rows, stride, stride, s.inverse, kChunk);
  transpose_16_rows(s.lead_rows, stride, stride, s.pair, 2 * kChunk);
  for (int i = 0; i < count; ++i) {
    for (std::int64_t c = 0; c < stride; c += kWidth) {
      const std::int64_t at = i * stride + c;
      const Lanes query = Lanes::load(s.query + first * stride + at);
      (query * Lanes::load(s.exponent + at)).store(s.lead_rows + at);
    }
  }
  transpose_16_rows(s.lead_rows, stride, stride, s.pair + kChunk, 2 * kChunk);
  for (std::int64_t d = 0; d < stride; ++d) {
    const Lanes decay = Lanes::broadcast(s.middle_decay[d]);
    for (int lane = 0; lane < 2 * kChunk; lane += kWidth) {
      const std::int64_t at = d * 2 * kChunk + lane;
      (Lanes::load(s.pair + at) * decay).store(s.carried + at);
    }
  }
}

// to[row, lane] = sum over channels of left[channel, row] right[channel, lane], both 16 wide.
inline void products_16(const float* left, std::int64_t left_stride, const float* right,
                        std::int64_t right_stride, std::int64_t channels, float* to) {
  for (int row = 0; row < kChunk; row += kRowTile) {
    for (int lane = 0; lane < kChunk; lane += kWidth) {
      Lanes sums[kRowTile][1];
      clear_tile(sums);
      multiply_tile(sums, left + row, left_stride, right + lane, right_stride, channels);
      for (int r = 0; r < kRowTile; ++r) sums[r][0].store(to + (row + r) * kChunk + lane);
    }
  }
}

// The two 16 x 16 triangles: Akk strictly below its diagonal, Aqk with it.
inline void token_products(const KdaScratch& s, const float* beta) {
  products_16(s.pair, 2 * kChunk, s.inverse, kChunk, s.key_stride, s.key_products);
  products_16(s.inverse, kChunk, s.pair + kChunk, 2 * kChunk, s.key_stride, s.query_products);
  for (int i = 0; i < kChunk; ++i) {
    for (int j = 0; j < kChunk; ++j) {
      float& key_product = s.key_products[i * kChunk + j];
      key_product = j < i ? beta[i] * key_product : 0.0f;
      if (j > i) s.query_products[j * kChunk + i] = 0.0f;
    }
  }
}

// block[row] = row of (k | q) exp(G) times the state's columns.
inline void multiply_state(const KdaScratch& s, const float* state) {
  for (int row = 0; row < 2 * kChunk; row += kRowTile) {
    Lanes sums[kRowTile][2];
    clear_tile(sums);
    multiply_tile(sums, s.carried + row, 2 * kChunk, state, s.value_stride, s.key_stride);
    for (int r = 0; r < kRowTile; ++r) {
      sums[r][0].store(s.block + (row + r) * kBlock);
      sums[r][1].store(s.block + (row + r) * kBlock + kWidth);
    }
  }
}

// (I + Akk) delta = beta (V - K S) by forward substitution.
inline void solve_delta(const KdaScratch& s, const float* value, const float* beta, int count) {
  for (int i = 0; i < kChunk; ++i) {
    float* row = s.delta + i * kBlock;
    if (i >= count) {
      Lanes::zero().store(row);
      Lanes::zero().store(row + kWidth);
      continue;
    }
    const Lanes strength = Lanes::broadcast(beta[i]);
    const float* product = s.block + i * kBlock;
    const float* target = value + i * s.value_stride;
    Lanes left = strength * (Lanes::load(target) - Lanes::load(product));
    Lanes right = strength * (Lanes::load(target + kWidth) - Lanes::load(product + kWidth));
    for (int j = 0; j < i; ++j) {
      const Lanes factor = Lanes::broadcast(s.key_products[i * kChunk + j]);
      left = negative_multiply_add(factor, Lanes::load(s.delta + j * kBlock), left);
      right = negative_multiply_add(factor, Lanes::load(s.delta + j * kBlock + kWidth), right);
    }
    left.store(row);
    right.store(row + kWidth);
  }
}

// output = (q exp(G)) S + Aqk delta.
inline void write_output(const KdaScratch& s, float* output, int count) {
  for (int row = 0; row < count; row += kRowTile) {
    Lanes sums[kRowTile][2];
    for (int r = 0; r < kRowTile; ++r) {
      const float* product = s.block + (kChunk + row + r) * kBlock;
      sums[r][0] = Lanes::load(product);
      sums[r][1] = Lanes::load(product + kWidth);
    }
    multiply_tile(sums, s.query_products + row, kChunk, s.delta, kBlock, kChunk);
    for (int r = 0; r < kRowTile && row + r < count; ++r) {
      sums[r][0].store(output + (row + r) * s.value_stride);
      sums[r][1].store(output + (row + r) * s.value_stride + kWidth);
    }
  }
}

// S <- diag(exp(G_last)) S + (k exp(G_last - G))' delta.
inline void update_state(const KdaScratch& s, float* state) {
  for (std::int64_t d = 0; d < s.key_stride; d += kRowTile) {
    Lanes sums[kRowTile][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRowTile; ++r) {
      const Lanes decay = Lanes::broadcast(s.full_decay[d + r]);
      const float* row = state + (d + r) * s.value_stride;
      sums[r][0] = decay * Lanes::load(row);
      sums[r][1] = decay * Lanes::load(row + kWidth);
    }
    multiply_tile(sums, s.final_rows + d, s.key_stride, s.delta, kBlock, kChunk);
#pragma GCC unroll 8
    for (int r = 0; r < kRowTile; ++r) {
      float* row = state + (d + r) * s.value_stride;
      sums[r][0].store(row);
      sums[r][1].store(row + kWidth);
    }
  }
}

// Tokens [first, first + count) of the rows, whose exponents are in place.
inline void run_chunk(const KdaScratch& s, std::int64_t first, int count) {
  // Rows past `count` meet only zero factors, but the beta beside them must be finite.
  float beta[kChunk] = {};
  for (int i = 0; i < count; ++i) beta[i] = s.beta[first + i];
  chunk_decays(s, first, count);
  scale_rows(s, first, count);
  token_products(s, beta);
  for (std::int64_t column = 0; column < s.value_stride; column += kBlock) {
    float* state = s.state + column;
    multiply_state(s, state);
    solve_delta(s, s.value + first * s.value_stride + column, beta, count);
    write_output(s, s.output + first * s.value_stride + column, count);
    update_state(s, state);
  }
}

// Tokens [first, first + count) one by one; the scaled rows' memory holds the step's vectors.
inline void run_steps(const KdaScratch& s, std::int64_t first, std::int64_t count) {
  for (std::int64_t i = first; i < first + count; ++i) {
    float* decay = s.exponent;
    for (std::int64_t c = 0; c < s.key_stride; c += kWidth) {
      exponential(Lanes::load(s.log_decay + i * s.key_stride + c)).store(decay + c);
    }
    KdaToken token = {};
    token.query = s.query + i * s.key_stride;
    token.key = s.key + i * s.key_stride;
    token.decay = decay;
    token.value = s.value + i * s.value_stride;
    token.beta = s.beta[i];
    token.decayed_query = s.lead_rows;
    token.decayed_key = s.inverse_rows;
    prepare_step(token, s.key_stride);
    kda_step(token, s.key_dim, s.value_stride, s.state, s.value_stride,
             s.output + i * s.value_stride);
  }
}

// All `count` <= 16 tokens in the rows: reads the rows and `state`, updates `state`, fills
// `output`.
inline void run_rows(const KdaScratch& s, int count) {
  int first = 0;
  while (first < count) {
    int length = count - first;
    while (length >= kMinChunk && !relative_exponents(s, first, length)) length /= 2;
    if (length >= kMinChunk) {
      run_chunk(s, first, length);
    } else {
      run_steps(s, first, length);
    }
    first += length;
  }
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
