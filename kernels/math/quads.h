// Products of a weight with five to eight rows of x rounded to bfloat16, at memory speed.
//
// A vector holds a quad (four columns) of each of eight tokens, which vdpbf16ps adds as two pairs:
// token m has the lanes 2m and 2m + 1. The weights' quad is broadcast. So a line of weights meets
// eight lines of x as in dot products along rows, but x is read once for a tile of weight rows, not
// once for each, and nothing is summed across lanes before the end.
//
// The panel of x: [quads of columns][8 tokens][4 columns], zero where there is no token or column.
#pragma once

#include "math/tiles.h"

#if defined(__AVX512BF16__)

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr int kQuadTokens = 8;
constexpr std::int64_t kQuadColumns = 4;
// Weight rows that pass over the panel together. More would share a set of the first cache: rows
// are often a multiple of 4096 bytes apart.
constexpr int kQuadRows = 8;

constexpr std::int64_t quad_panel_elements(std::int64_t columns) {
  return round_up(columns, kQuadColumns) * kQuadTokens;
}

// Where the panel holds a column of a token.
constexpr std::int64_t quad_position(std::int64_t column, std::int64_t token) {
  return (column / kQuadColumns * kQuadTokens + token) * kQuadColumns + column % kQuadColumns;
}

// Rounds sixteen columns and stores the quad of columns i to i + 3 at to_quad(i).
template <typename ToQuad>
inline void store_rounded_quads(__m512 columns, ToQuad&& to_quad) {
  std::uint16_t rounded[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), (__m256i)_mm512_cvtneps_pbh(columns));
  for (std::int64_t i = 0; i < 16; i += kQuadColumns) {
    std::memcpy(to_quad(i), rounded + i, sizeof(*rounded) * kQuadColumns);
  }
}

// Rounds up to eight rows of x, row_at(0), row_at(1) and so on, into a panel.
template <typename RowAt>
inline void pack_quads(RowAt&& row_at, std::int64_t tokens, std::int64_t columns,
                       std::uint16_t* panel) {
  if (tokens < kQuadTokens || columns % kQuadColumns != 0) {
    const std::int64_t elements = quad_panel_elements(columns);
    std::memset(panel, 0, sizeof(std::uint16_t) * static_cast<std::size_t>(elements));
  }
  for (std::int64_t m = 0; m < tokens; ++m) {
    const float* row = row_at(m);
    std::int64_t column = 0;
    for (; column + 16 <= columns; column += 16) {
      store_rounded_quads(_mm512_loadu_ps(row + column),
                          [&](std::int64_t i) { return panel + quad_position(column + i, m); });
    }
    for (; column < columns; ++column) {
      panel[quad_position(column, m)] = bf16_from_float(row[column]);
    }
  }
}

// The first `count` of a quad's columns, zeros behind.
inline std::int64_t load_quad(const std::uint16_t* from, std::int64_t count = kQuadColumns) {
  std::int64_t quad = 0;
  std::memcpy(&quad, from, sizeof(*from) * static_cast<std::size_t>(count));
  return quad;
}

// sums[r] += weight row r, `stride` elements from the one before, times the panel. With kFetch the
// caller reads the rows that follow these next.
template <int kRows, bool kFetch>
inline void multiply_quads(const std::uint16_t* weight, std::int64_t stride,
                           const std::uint16_t* panel, std::int64_t columns,
                           __m512 (&sums)[kRows]) {
  constexpr std::int64_t kLine = 32;
  const auto multiply = [&](std::int64_t column, std::int64_t count) {
    const auto right = (__m512bh)_mm512_loadu_si512(panel + column * kQuadTokens);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const std::int64_t quad = load_quad(weight + r * stride + column, count);
      sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)_mm512_set1_epi64(quad), right);
    }
  };
  std::int64_t column = 0;
  for (; column + kLine <= columns; column += kLine) {
#pragma GCC unroll 8
    for (int r = 0; kFetch && r < kRows; ++r) prefetch_far(weight + (kRows + r) * stride + column);
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kLine; i += kQuadColumns) multiply(column + i, kQuadColumns);
  }
  for (; column + kQuadColumns <= columns; column += kQuadColumns) multiply(column, kQuadColumns);
  if (column < columns) multiply(column, columns - column);
}

// The eight tokens' sums of one weight row.
inline void store_quad_sums(__m512 sums, float (&tokens)[kQuadTokens]) {
  const __m512 both = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(tokens, _mm512_castps512_ps256(_mm512_permutexvar_ps(even, both)));
}

// Calls done(row, token, sum) for rows [row, row + kRows) of a weight.
template <int kRows, typename Done>
inline void quad_rows(const std::uint16_t* weight, std::int64_t row, std::int64_t columns,
                      const std::uint16_t* panel, std::int64_t tokens, Done&& done) {
  __m512 sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
  multiply_quads<kRows, true>(weight + row * columns, columns, panel, columns, sums);
  for (int r = 0; r < kRows; ++r) {
    float sum[kQuadTokens];
    store_quad_sums(sums[r], sum);
    for (std::int64_t m = 0; m < tokens; ++m) done(row + r, m, sum[m]);
  }
}

// Calls done(row, token, sum) for every row of a [rows, columns] weight and each of up to eight
// tokens of a panel.
template <typename Done>
inline void matrix_times_quads(const std::uint16_t* weight, std::int64_t rows, std::int64_t columns,
                               const std::uint16_t* panel, std::int64_t tokens, Done&& done) {
  std::int64_t row = 0;
  for (; row + kQuadRows <= rows; row += kQuadRows) {
    quad_rows<kQuadRows>(weight, row, columns, panel, tokens, done);
  }
  for (; row < rows; ++row) quad_rows<1>(weight, row, columns, panel, tokens, done);
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge

#endif
