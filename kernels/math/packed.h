// bf12 rows: bfloat16 weights in 12 bits each, without loss, and their products at memory speed.
//
// The exponents of a trained row are few. A packed row stores, for `columns` weights (a multiple of
// 128), blocks of 192 bytes and a trailer of 64:
//   block    64 bytes of pairs: the high nibble belongs to column j, the low one to column 64 + j;
//            128 bytes, one a column.
//            A column's byte and nibble are 12 bits: sign, 4-bit code, mantissa (7 bits).
//   trailer  byte 0: base; byte 1: number of exceptions, at most 15; bytes 4 on: the exceptions,
//            each a column and a bfloat16 (uint16, little endian).
// Code 0 is zero (of that sign), code c an exponent field of base + c. A weight outside the window
// is stored as 0 and listed as an exception. A damaged row decodes to wrong numbers, and touches
// nothing outside: a column that is out of range is passed over.
#pragma once

#include "math/lanes.h"
#include "math/tiles.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr std::int64_t kPackedBlock = 128;
constexpr std::int64_t kPackedBlockBytes = 192;
constexpr std::int64_t kPackedTrailerBytes = 64;
constexpr std::int64_t kPackedExceptions = 15;

// Rows of x that share one unpacking of the weights.
constexpr int kPackedTokens = 8;

// Bytes of weight in a task: the last rows of one fetch ahead what another task may read, so few
// long tasks waste less than many short ones (measured).
constexpr std::int64_t kPackedTaskBytes = 512 << 10;

constexpr std::int64_t packed_row_bytes(std::int64_t columns) {
  return columns / kPackedBlock * kPackedBlockBytes + kPackedTrailerBytes;
}

// The part of a row that is not blocks.
class PackedTrailer {
 public:
  PackedTrailer(const std::uint8_t* row, std::int64_t columns)
      : bytes_(row + columns / kPackedBlock * kPackedBlockBytes), columns_(columns) {}

  int base() const { return bytes_[0]; }

  // Calls body(column, bits) for every exception.
  template <typename Body>
  void for_each_exception(Body&& body) const {
    const std::int64_t count = bytes_[1] < kPackedExceptions ? bytes_[1] : kPackedExceptions;
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint16_t entry[2];
      std::memcpy(entry, bytes_ + 4 + 4 * i, sizeof(entry));
      if (entry[0] < columns_) body(entry[0], entry[1]);
    }
  }

 private:
  const std::uint8_t* bytes_;
  std::int64_t columns_;
};

inline double power_of_two(int exponent) {
  const std::uint64_t bits = static_cast<std::uint64_t>(exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// ---- Blocks ----------------------------------------------------------------------------------

#if defined(__AVX512F__)

// Columns [32 kQuarter, 32 kQuarter + 32) of a block in 16-bit lanes, as sign, four zeros, code,
// mantissa: a bfloat16 whose exponent field is the code. An arithmetic shift moves the 12 bits into
// place and fills the gap with copies of the sign, which the caller masks out (kPackedBits).
template <int kQuarter>
inline __m512i packed_words(const std::uint8_t* block) {
  __m512i nibbles = _mm512_loadu_si512(block);
  if (kQuarter >= 2) nibbles = _mm512_slli_epi16(nibbles, 4);
  const __m512i bytes = _mm512_loadu_si512(block + 64 + kQuarter / 2 * 64);
  const __m512i words = kQuarter % 2 == 0 ? _mm512_unpacklo_epi8(nibbles, bytes)
                                          : _mm512_unpackhi_epi8(nibbles, bytes);
  return _mm512_srai_epi16(words, 4);
}

constexpr std::uint32_t kPackedBits = 0x87ff;

// Two quarters of one block, in the order of columns, as bfloat16.
template <int kQuarter>
inline void unpack_half_block(const std::uint8_t* block, int base, std::uint16_t* to) {
  const __m512i mask = _mm512_set1_epi16(static_cast<short>(kPackedBits));
  const __m512i exponent = _mm512_set1_epi16(static_cast<short>(base << 7));
  const __m512i codes = _mm512_set1_epi16(0x0780);
  __m512i words[2] = {_mm512_and_si512(packed_words<kQuarter>(block), mask),
                      _mm512_and_si512(packed_words<kQuarter + 1>(block), mask)};
  for (__m512i& word : words) {
    word = _mm512_mask_add_epi16(word, _mm512_test_epi16_mask(word, codes), word, exponent);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi64(words[0], low, words[1]));
  _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi64(words[0], high, words[1]));
}

inline void unpack_block(const std::uint8_t* block, int base, std::uint16_t* to) {
  unpack_half_block<0>(block, base, to);
  unpack_half_block<2>(block, base, to + 64);
}

#else

inline void unpack_block(const std::uint8_t* block, int base, std::uint16_t* to) {
  const auto unpack = [&](unsigned byte, unsigned nibble) {
    const unsigned code = byte >> 3 & 15u;
    const unsigned exponent = code == 0 ? 0u : static_cast<unsigned>(base) + code;
    return static_cast<std::uint16_t>((byte & 128u) << 8 | (exponent & 255u) << 7 |
                                      (byte & 7u) << 4 | nibble);
  };
  for (int j = 0; j < 64; ++j) to[j] = unpack(block[64 + j], block[j] >> 4);
  for (int j = 0; j < 64; ++j) to[64 + j] = unpack(block[128 + j], block[j] & 15u);
}

#endif

// One row as bfloat16; `to` has `columns` elements.
inline void unpack_row(const std::uint8_t* row, std::int64_t columns, std::uint16_t* to) {
  const PackedTrailer trailer(row, columns);
  for (std::int64_t column = 0; column < columns; column += kPackedBlock) {
    unpack_block(row + column / kPackedBlock * kPackedBlockBytes, trailer.base(), to + column);
  }
  trailer.for_each_exception([&](std::int64_t column, std::uint16_t bits) { to[column] = bits; });
}

// ---- The other side --------------------------------------------------------------------------

// Floats that a row of x takes in the form that packed rows are multiplied with.
constexpr std::int64_t packed_x_floats(std::int64_t columns) { return columns + 16; }

#if defined(__AVX512F__)

// Weights meet x with exponent fields of 1 to 15, some 2^-119; x is scaled by a power of two so
// that its largest number is 2^100 or a little more, and no product leaves the normal range unless
// it is 2^-100 of the largest. (x below 2^-27 as a whole is scaled by 2^127, the most there is.)
inline int packed_x_shift(const float* x, std::int64_t columns) {
  __m512i largest = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (std::int64_t c = 0; c < columns; c += 16) {
    largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_loadu_si512(x + c), magnitude));
  }
  const int exponent = static_cast<int>(_mm512_reduce_max_epu32(largest) >> 23);
  return 227 - exponent < 127 ? 227 - exponent : 127;
}

// Where the column goes: 64 by 64, first the even, then the odd columns of each quarter, whose
// columns are those of the unpack instructions.
inline std::int64_t packed_x_position(std::int64_t column) {
  const std::int64_t within = column % 64;
  return column - within + within % 16 / 8 * 32 + within % 2 * 16 + within / 16 * 4 +
         within % 8 / 2;
}

// `to` has packed_x_floats(columns) elements and may be `from`.
inline void arrange_packed_x(const float* from, std::int64_t columns, float* to) {
  const int shift = packed_x_shift(from, columns);
  const __m512 scale =
      _mm512_set1_ps(float_from_bits(static_cast<std::uint32_t>(shift + 127) << 23));
  const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 0, 2, 4, 6, 16, 18, 20, 22);
  for (std::int64_t c = 0; c < columns; c += 64) {
    __m512 x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm512_mul_ps(_mm512_loadu_ps(from + c + 16 * i), scale);
    for (int place = 0; place < 4; ++place) {
      const __m512i index = _mm512_add_epi32(first, _mm512_set1_epi32(place / 2 * 8 + place % 2));
      const __m512 left = _mm512_permutex2var_ps(x[0], index, x[1]);
      const __m512 right = _mm512_permutex2var_ps(x[2], index, x[3]);
      _mm512_storeu_ps(to + c + 16 * place, _mm512_shuffle_f32x4(left, right, 0x44));
    }
  }
  to[columns] = static_cast<float>(shift);
}

#else

constexpr std::int64_t packed_x_position(std::int64_t column) { return column; }

inline void arrange_packed_x(const float* from, std::int64_t columns, float* to) {
  if (to != from) std::memcpy(to, from, sizeof(float) * static_cast<std::size_t>(columns));
  to[columns] = 0.0f;
}

#endif

// ---- Products --------------------------------------------------------------------------------

// The product of a row and one row of x, given that of the blocks with base 0 and x scaled by
// 2^shift; value(column) is x as scaled. In double, so that nothing is rounded before the end.
template <typename Value>
inline float packed_sum(const PackedTrailer& trailer, int base, int shift, float blocks,
                        Value&& value) {
  double sum = static_cast<double>(blocks) * power_of_two(base - shift);
  trailer.for_each_exception([&](std::int64_t column, std::uint16_t bits) {
    const double factor = static_cast<double>(value(column)) * power_of_two(-shift);
    sum += static_cast<double>(float_from_bf16(bits)) * factor;
  });
  return static_cast<float>(sum);
}

// The same for one arranged row of x.
inline float packed_sum(const PackedTrailer& trailer, int base, const float* x,
                        std::int64_t columns, float blocks) {
  return packed_sum(trailer, base, static_cast<int>(x[columns]), blocks,
                    [&](std::int64_t column) { return x[packed_x_position(column)]; });
}

#if defined(__AVX512F__)

// Fetches what the caller reads next: a block has three lines, and four quarters ask in turn.
template <int kQuarter, int kRows>
inline void fetch_quarter(const std::uint8_t* const (&rows)[kRows], std::int64_t at) {
  if (kQuarter == 3) return;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) prefetch_far(rows[r] + at + 64 * kQuarter);
}

template <int kQuarter, int kRows, int kTokens>
inline void multiply_quarter(const std::uint8_t* const (&rows)[kRows], std::int64_t at,
                             std::int64_t ahead, const float* x, std::int64_t x_stride,
                             __m512 (&sums)[kRows][kTokens]) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(kPackedBits << 16));
  fetch_quarter<kQuarter>(rows, at + ahead);
  const auto multiply_row = [&](int r, auto&& even_x, auto&& odd_x) {
    const __m512i words = packed_words<kQuarter>(rows[r] + at);
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(words, mask));
    const __m512 even = _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(words, 16), mask));
#pragma GCC unroll 8
    for (int m = 0; m < kTokens; ++m) {
      sums[r][m] = _mm512_fmadd_ps(even, even_x(m), sums[r][m]);
      sums[r][m] = _mm512_fmadd_ps(odd, odd_x(m), sums[r][m]);
    }
  };
  x += 32 * kQuarter;
  if constexpr (kTokens > kDotTokens) {  // too many to keep in registers: each row reads x again
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      multiply_row(
          r, [&](int m) { return _mm512_loadu_ps(x + m * x_stride); },
          [&](int m) { return _mm512_loadu_ps(x + m * x_stride + 16); });
    }
  } else {
    __m512 even_x[kTokens], odd_x[kTokens];
#pragma GCC unroll 4
    for (int m = 0; m < kTokens; ++m) {
      even_x[m] = _mm512_loadu_ps(x + m * x_stride);
      odd_x[m] = _mm512_loadu_ps(x + m * x_stride + 16);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      multiply_row(r, [&](int m) { return even_x[m]; }, [&](int m) { return odd_x[m]; });
    }
  }
}

// sums[r][m] = packed row r . arranged row m. The caller reads the rows `ahead` bytes further next.
template <int kRows, int kTokens>
inline void packed_dot_rows(const std::uint8_t* const (&rows)[kRows], std::int64_t ahead,
                            const float* x, std::int64_t x_stride, std::int64_t columns,
                            float (&sums)[kRows][kTokens]) {
  __m512 partial[kRows][kTokens];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int m = 0; m < kTokens; ++m) partial[r][m] = _mm512_setzero_ps();
  }
  std::int64_t at = 0;
  for (std::int64_t column = 0; column < columns; column += kPackedBlock) {
    multiply_quarter<0>(rows, at, ahead, x + column, x_stride, partial);
    multiply_quarter<1>(rows, at, ahead, x + column, x_stride, partial);
    multiply_quarter<2>(rows, at, ahead, x + column, x_stride, partial);
    multiply_quarter<3>(rows, at, ahead, x + column, x_stride, partial);
    at += kPackedBlockBytes;
  }
  for (int r = 0; r < kRows; ++r) {
    prefetch_far(rows[r] + at + ahead);
    const PackedTrailer trailer(rows[r], columns);
    for (int m = 0; m < kTokens; ++m) {
      const float blocks = _mm512_reduce_add_ps(partial[r][m]);
      sums[r][m] = packed_sum(trailer, trailer.base(), x + m * x_stride, columns, blocks);
    }
  }
}

// Rows that are read side by side, each a stream of its own: eight are read faster than four or
// sixteen (measured), fewer where there are no registers for so many sums.
template <int kTokens>
constexpr int kPackedRows = kTokens <= 2   ? 8
                            : kTokens <= 4 ? 4
                                           : 2;

#else

template <int kRows, int kTokens>
inline void packed_dot_rows(const std::uint8_t* const (&rows)[kRows], std::int64_t, const float* x,
                            std::int64_t x_stride, std::int64_t columns,
                            float (&sums)[kRows][kTokens]) {
  for (int r = 0; r < kRows; ++r) {
    const PackedTrailer trailer(rows[r], columns);
    Lanes partial[kTokens];
    for (int m = 0; m < kTokens; ++m) partial[m] = Lanes::zero();
    for (std::int64_t column = 0; column < columns; column += kPackedBlock) {
      std::uint16_t words[kPackedBlock];
      unpack_block(rows[r] + column / kPackedBlock * kPackedBlockBytes, trailer.base(), words);
      for (std::int64_t c = 0; c < kPackedBlock; c += kWidth) {
        const Lanes left = Lanes::load_bf16(words + c);
        for (int m = 0; m < kTokens; ++m) {
          const Lanes right = Lanes::load(x + m * x_stride + column + c);
          partial[m] = multiply_add(left, right, partial[m]);
        }
      }
    }
    for (int m = 0; m < kTokens; ++m) {
      sums[r][m] = packed_sum(trailer, 0, x + m * x_stride, columns, sum_of(partial[m]));
    }
  }
}

template <int kTokens>
constexpr int kPackedRows = 1;

#endif

// Calls done(row, token, sum) for rows [0, rows) and each of kTokens arranged rows of x, which lie
// packed_x_floats(columns) apart.
template <int kTokens, typename Done>
inline void packed_times_tokens(const std::uint8_t* weight, std::int64_t rows, std::int64_t columns,
                                const float* x, Done&& done) {
  constexpr int kRows = kPackedRows<kTokens>;
  const std::int64_t row_bytes = packed_row_bytes(columns), stride = packed_x_floats(columns);
  std::int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    const std::uint8_t* side_by_side[kRows];
    for (int r = 0; r < kRows; ++r) side_by_side[r] = weight + (row + r) * row_bytes;
    float sums[kRows][kTokens];
    packed_dot_rows(side_by_side, kRows * row_bytes, x, stride, columns, sums);
    for (int r = 0; r < kRows; ++r) {
      for (int m = 0; m < kTokens; ++m) done(row + r, m, sums[r][m]);
    }
  }
  for (; row < rows; ++row) {
    const std::uint8_t* const alone[1] = {weight + row * row_bytes};
    float sums[1][kTokens];
    packed_dot_rows(alone, row_bytes, x, stride, columns, sums);
    for (int m = 0; m < kTokens; ++m) done(row, m, sums[0][m]);
  }
}

// The same for any number of tokens, kPackedTokens at a time.
template <typename Done>
inline void packed_times_rows(const std::uint8_t* weight, std::int64_t rows, std::int64_t columns,
                              const float* x, std::int64_t tokens, Done&& done) {
  for (std::int64_t first = 0; first < tokens; first += kPackedTokens) {
    with_token_count<kPackedTokens>(tokens - first, [&](auto count) {
      packed_times_tokens<decltype(count)::value>(
          weight, rows, columns, x + first * packed_x_floats(columns),
          [&](std::int64_t row, int token, float sum) { done(row, first + token, sum); });
    });
  }
}

// Arranges `tokens` contiguous rows of x.
inline void arrange_packed_rows(const float* from, std::int64_t tokens, std::int64_t columns,
                                float* to) {
  for (std::int64_t m = 0; m < tokens; ++m) {
    arrange_packed_x(from + m * columns, columns, to + m * packed_x_floats(columns));
  }
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
