// Register-tiled pieces of matrix products, shared by the KDA and MoE kernels.
#pragma once

#include <type_traits>

#include "math/lanes.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

// sums[r][c] += sum over step of a[step * a_stride + r] * b[step * b_stride + c lanes].
// `a` is read by broadcast with its rows contiguous, so that the row offsets are constants.
template <int kRows, int kColumns>
inline void multiply_tile(Lanes (&sums)[kRows][kColumns], const float* a, std::int64_t a_stride,
                          const float* b, std::int64_t b_stride, std::int64_t steps) {
  for (std::int64_t step = 0; step < steps; ++step) {
    Lanes right[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) right[c] = Lanes::load(b + c * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes left = Lanes::broadcast(a[r]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[r][c] = multiply_add(left, right[c], sums[r][c]);
    }
    a += a_stride;
    b += b_stride;
  }
}

template <int kRows, int kColumns>
inline void clear_tile(Lanes (&sums)[kRows][kColumns]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sums[r][c] = Lanes::zero();
  }
}

#if defined(__AVX512F__)
// Transposes a 16 x 16 square of 32-bit words, one row a register.
inline void transpose_16(__m512 (&a)[16]) {
  __m512 b[16];
  // Four rounds of pairwise exchange: 1, 2, 4 and 8 lanes apart.
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
  }
}
#endif

// to[column * to_stride + row] = from[row * from_stride + column] for 16 rows and `columns`
// columns, a multiple of 16.
inline void transpose_16_rows(const float* from, std::int64_t from_stride, std::int64_t columns,
                              float* to, std::int64_t to_stride) {
#if defined(__AVX512F__)
  for (std::int64_t column = 0; column < columns; column += 16) {
    __m512 square[16];
    for (int i = 0; i < 16; ++i) square[i] = _mm512_loadu_ps(from + i * from_stride + column);
    transpose_16(square);
    for (int i = 0; i < 16; ++i) {
      _mm512_storeu_ps(to + (column + i) * to_stride, square[i]);
    }
  }
#else
  for (int row = 0; row < 16; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      to[column * to_stride + row] = from[row * from_stride + column];
    }
  }
#endif
}

// ---- Matrix-vector products at memory speed --------------------------------------------------

// sums[r][m] = rows[r] . x row m, over `columns`. All rows of a call are read side by side; the
// caller reads the rows `ahead` elements further on next, so each line fetches the one it stands
// for there. (Into the second cache level: twice the speed of a distance within the row, measured.)
template <int kRows, int kTokens, typename Weight>
inline void dot_rows(const Weight* const (&rows)[kRows], std::int64_t ahead, const float* x,
                     std::int64_t x_stride, std::int64_t columns, float (&sums)[kRows][kTokens]) {
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(Weight));
  Lanes partial[kRows][kTokens];
  clear_tile(partial);
  std::int64_t column = 0;
  const auto multiply = [&](std::int64_t at) {
    Lanes right[kTokens];
#pragma GCC unroll 8
    for (int m = 0; m < kTokens; ++m) right[m] = Lanes::load(x + m * x_stride + at);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes left = load_lanes(rows[r] + at);
#pragma GCC unroll 8
      for (int m = 0; m < kTokens; ++m) {
        partial[r][m] = multiply_add(left, right[m], partial[r][m]);
      }
    }
  };
  for (; column + kLine <= columns; column += kLine) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) prefetch_far(rows[r] + ahead + column);
#pragma GCC unroll 8
    for (std::int64_t at = 0; at < kLine; at += kWidth) multiply(column + at);
  }
  for (; column + kWidth <= columns; column += kWidth) multiply(column);
  const std::int64_t tail = columns - column;
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < kTokens; ++m) {
      if (tail > 0) {
        const Lanes left = load_lanes(rows[r] + column, tail);
        const Lanes right = load_first(x + m * x_stride + column, tail);
        partial[r][m] = multiply_add(left, right, partial[r][m]);
      }
      sums[r][m] = sum_of(partial[r][m]);
    }
  }
}

// Tokens that pass over the weight rows at once, and the sums that are then kept in registers
// beside their operands.
constexpr int kDotTokens = 4;
constexpr int kDotSums = kWidth >= 16 ? 16 : 8;

// Calls done(row, token, sum) for every row of a [rows, columns] block and each of kTokens tokens.
template <int kTokens, typename Weight, typename Done>
inline void matrix_times_tokens(const Weight* weight, std::int64_t rows, std::int64_t columns,
                                const float* x, std::int64_t x_stride, Done&& done) {
  constexpr int kRows = kDotSums / kTokens < 4 ? kDotSums / kTokens : 4;
  std::int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    const Weight* side_by_side[kRows];
    for (int r = 0; r < kRows; ++r) side_by_side[r] = weight + (row + r) * columns;
    float sums[kRows][kTokens];
    dot_rows<kRows, kTokens, Weight>(side_by_side, kRows * columns, x, x_stride, columns, sums);
    for (int r = 0; r < kRows; ++r) {
      for (int m = 0; m < kTokens; ++m) done(row + r, m, sums[r][m]);
    }
  }
  for (; row < rows; ++row) {
    const Weight* const alone[1] = {weight + row * columns};
    float sums[1][kTokens];
    dot_rows(alone, columns, x, x_stride, columns, sums);
    for (int m = 0; m < kTokens; ++m) done(row, m, sums[0][m]);
  }
}

// Calls body(std::integral_constant<int, min(tokens, kMost)>), so that the number of tokens is a
// constant in the loops.
template <int kMost, typename Body>
inline void with_token_count(std::int64_t tokens, Body&& body) {
  if constexpr (kMost > 1) {
    if (tokens < kMost) return with_token_count<kMost - 1>(tokens, body);
  }
  body(std::integral_constant<int, kMost>());
}

// The same for any number of tokens, kDotTokens at a time: a block of rows should be small enough
// to stay in cache while the groups of tokens pass over it.
template <typename Weight, typename Done>
inline void matrix_times_rows(const Weight* weight, std::int64_t rows, std::int64_t columns,
                              const float* x, std::int64_t x_stride, std::int64_t tokens,
                              Done&& done) {
  for (std::int64_t first = 0; first < tokens; first += kDotTokens) {
    with_token_count<kDotTokens>(tokens - first, [&](auto count) {
      matrix_times_tokens<decltype(count)::value>(
          weight, rows, columns, x + first * x_stride, x_stride,
          [&](std::int64_t row, int token, float sum) { done(row, first + token, sum); });
    });
  }
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
