// Products of bf12 rows (math/packed.h) with five to eight rows of x rounded to bfloat16.
//
// A block is unpacked into a few lines of the first cache as the instructions leave it, with a zero
// exponent base and its columns out of order; so x is scaled, and its panel (math/quads.h) ordered
// alike.
#pragma once

#include "math/packed.h"
#include "math/quads.h"

#if defined(__AVX512BF16__)

namespace hybridge {
namespace HYBRIDGE_ISA {

// Where unpacking leaves a column.
constexpr std::int64_t packed_place(std::int64_t column) {
  const std::int64_t within = column % 64;
  return column - within + within % 16 / 8 * 32 + within / 16 * 8 + within % 8;
}

// Up to eight scaled and rounded rows of x in that order, and behind them the powers of two that
// they were scaled by: a view of memory that pack() has filled.
class PackedQuads {
 public:
  static constexpr std::int64_t bytes(std::int64_t columns) {
    return quad_panel_elements(columns) * std::int64_t{sizeof(std::uint16_t)} +
           kQuadTokens * std::int64_t{sizeof(std::int32_t)};
  }

  // `memory` has bytes(columns) bytes and must outlive this.
  PackedQuads(void* memory, std::int64_t tokens, std::int64_t columns)
      : panel_(static_cast<std::uint16_t*>(memory)),
        shift_(reinterpret_cast<std::int32_t*>(panel_ + quad_panel_elements(columns))),
        tokens_(tokens),
        columns_(columns) {}

  // Fills the memory from the rows row_at(0), row_at(1) and so on.
  template <typename RowAt>
  void pack(RowAt&& row_at) const {
    if (tokens_ < kQuadTokens) std::memset(panel_, 0, static_cast<std::size_t>(bytes(columns_)));
    for (std::int64_t m = 0; m < tokens_; ++m) pack_row(row_at(m), m);
  }

  const std::uint16_t* panel() const { return panel_; }
  std::int64_t tokens() const { return tokens_; }
  std::int64_t columns() const { return columns_; }

  // The product of one packed row and token m, given that of its blocks.
  float sum(const PackedTrailer& trailer, std::int64_t m, float blocks) const {
    return packed_sum(trailer, trailer.base(), shift_[m], blocks, [&](std::int64_t column) {
      return float_from_bf16(panel_[quad_position(packed_place(column), m)]);
    });
  }

 private:
  void pack_row(const float* row, std::int64_t m) const {
    shift_[m] = packed_x_shift(row, columns_);
    const __m512 scale =
        _mm512_set1_ps(float_from_bits(static_cast<std::uint32_t>(shift_[m] + 127) << 23));
    for (std::int64_t c = 0; c < columns_; c += 16) {
      store_rounded_quads(_mm512_mul_ps(_mm512_loadu_ps(row + c), scale), [&](std::int64_t i) {
        return panel_ + quad_position(packed_place(c + i), m);
      });
    }
  }

  std::uint16_t* panel_;
  std::int32_t* shift_;
  std::int64_t tokens_, columns_;
};

// A block as it is multiplied: [128] bfloat16 numbers in the order of packed_place.
template <int kQuarter = 0>
inline void unpack_in_place_order(const std::uint8_t* block, std::uint16_t* to) {
  const __m512i mask = _mm512_set1_epi16(static_cast<short>(kPackedBits));
  _mm512_store_si512(to + 32 * kQuarter, _mm512_and_si512(packed_words<kQuarter>(block), mask));
  if constexpr (kQuarter < 3) unpack_in_place_order<kQuarter + 1>(block, to);
}

template <int kRows, typename Done>
inline void packed_quad_rows(const std::uint8_t* weight, std::int64_t row, const PackedQuads& x,
                             Done&& done) {
  const std::int64_t row_bytes = packed_row_bytes(x.columns());
  const std::uint8_t* rows = weight + row * row_bytes;
  __m512 sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
  alignas(64) std::uint16_t unpacked[kRows * kPackedBlock];
  for (std::int64_t column = 0; column < x.columns(); column += kPackedBlock) {
    const std::uint8_t* block = rows + column / kPackedBlock * kPackedBlockBytes;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const std::uint8_t* here = block + r * row_bytes;
      for (std::int64_t line = 0; line < kPackedBlockBytes; line += 64) {
        prefetch_far(here + kRows * row_bytes + line);
      }
      unpack_in_place_order(here, unpacked + r * kPackedBlock);
    }
    multiply_quads<kRows, false>(unpacked, kPackedBlock, x.panel() + column * kQuadTokens,
                                 kPackedBlock, sums);
  }
  for (int r = 0; r < kRows; ++r) {
    const PackedTrailer trailer(rows + r * row_bytes, x.columns());
    float blocks[kQuadTokens];
    store_quad_sums(sums[r], blocks);
    for (std::int64_t m = 0; m < x.tokens(); ++m) done(row + r, m, x.sum(trailer, m, blocks[m]));
  }
}

// Calls done(row, token, sum) for `rows` packed rows and each token of x.
template <typename Done>
inline void packed_times_quads(const std::uint8_t* weight, std::int64_t rows, const PackedQuads& x,
                               Done&& done) {
  std::int64_t row = 0;
  for (; row + kQuadRows <= rows; row += kQuadRows) {
    packed_quad_rows<kQuadRows>(weight, row, x, done);
  }
  for (; row < rows; ++row) packed_quad_rows<1>(weight, row, x, done);
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge

#endif
