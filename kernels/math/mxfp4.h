// MXFP4 in registers (spec MODELS.md 11.2): E2M1 nibbles by table look-up, scales 2^(s - 127) by
// bits. Packed weights are never expanded in memory beyond a tile.
#pragma once

#include "math/lanes.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr std::int64_t kScaleBlock = 32;  // elements that share a scale
constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2^(s - 127), an E8M0 number (OCP MX v1.0, 5.4.1): s = 0 is the subnormal 2^-127, which the
// exponent field alone cannot say, and s = 255 is NaN, where the field alone says infinity.
inline float mx_scale(std::uint8_t s) {
  if (s == 0 || s == 255) return float_from_bits(s == 0 ? 0x00400000u : 0x7fc00000u);
  return float_from_bits(static_cast<std::uint32_t>(s) << 23);
}

// kWidth words of eight nibbles each.
#if defined(__AVX512F__)

struct Nibbles {
  __m512i words;
  static Nibbles load(const void* from) { return {_mm512_loadu_si512(from)}; }
};

// The values of nibble `place` (0 is the lowest) of every word.
inline Lanes mx_values(Nibbles nibbles, int place) {
  const __m512i index = _mm512_srli_epi32(nibbles.words, static_cast<unsigned>(4 * place));
  return {_mm512_permutexvar_ps(index, _mm512_loadu_ps(kE2m1))};
}

// Word w belongs to the scale block w / 4.
inline Lanes mx_word_scales(const std::uint8_t* scales) {
  std::int32_t four;
  std::memcpy(&four, scales, sizeof(four));
  const __m128i spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m128i bytes = _mm_shuffle_epi8(_mm_cvtsi32_si128(four), spread);
  const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
  const __m512i finite = _mm512_max_epu32(exponent, _mm512_set1_epi32(0x00400000));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(finite, _mm512_set1_epi32(0x7f800000));
  return {_mm512_castsi512_ps(_mm512_mask_set1_epi32(finite, nan, 0x7fc00000))};
}

#elif defined(__AVX2__)

struct Nibbles {
  __m256i words;
  static Nibbles load(const void* from) {
    return {_mm256_loadu_si256(static_cast<const __m256i*>(from))};
  }
};

// Eight table entries: the sign bit is moved over by itself.
inline Lanes mx_values(Nibbles nibbles, int place) {
  const __m256i index = _mm256_srli_epi32(nibbles.words, 4 * place);
  const __m256 size = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kE2m1), index);
  const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  return {_mm256_or_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)))};
}

inline Lanes mx_word_scales(const std::uint8_t* scales) {
  const float first = mx_scale(scales[0]), second = mx_scale(scales[1]);
  return {_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_set1_ps(first)), _mm_set1_ps(second), 1)};
}

#else

struct Nibbles {
  std::uint32_t words[kWidth];
  static Nibbles load(const void* from) {
    Nibbles nibbles;
    std::memcpy(nibbles.words, from, sizeof(nibbles.words));
    return nibbles;
  }
};

inline Lanes mx_values(const Nibbles& nibbles, int place) {
  Lanes lanes = Lanes::zero();
  for (int w = 0; w < kWidth; ++w) lanes.value[w] = kE2m1[(nibbles.words[w] >> (4 * place)) & 15u];
  return lanes;
}

inline Lanes mx_word_scales(const std::uint8_t* scales) {
  return Lanes::broadcast(mx_scale(scales[0]));
}

#endif

// ---- Dot products with packed rows -----------------------------------------------------------

constexpr std::int64_t kMxChunk = 8 * kWidth;  // elements in one vector of words
constexpr std::int64_t kMxChunkBytes = kMxChunk / 2;
constexpr std::int64_t kMxChunkScales = kMxChunk / kScaleBlock;

constexpr std::int64_t mx_row_floats(std::int64_t columns) { return round_up(columns, kMxChunk); }

// Where element `column` of a row belongs so that it meets its weight: chunk by chunk, all words'
// lowest nibbles first. `to` has mx_row_floats(columns) elements; those beyond columns are 0.
inline std::int64_t mx_position(std::int64_t column) {
  const std::int64_t within = column % kMxChunk;
  return column - within + within % 8 * kWidth + within / 8;
}

inline void mx_arrange_row(const float* from, std::int64_t columns, float* to) {
  std::memset(to, 0, sizeof(float) * static_cast<std::size_t>(mx_row_floats(columns)));
  for (std::int64_t c = 0; c < columns; ++c) to[mx_position(c)] = from[c];
}

struct MxRow {
  const std::uint8_t* packed;
  const std::uint8_t* scale;
};

// One chunk of kRows rows times kTokens arranged rows of x, x_stride apart.
template <int kRows, int kTokens>
inline void mx_multiply_chunk(const MxRow (&rows)[kRows], const float* x, std::int64_t x_stride,
                              Lanes (&sums)[kRows][kTokens]) {
  Nibbles nibbles[kRows];
  Lanes block[kRows][kTokens];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    nibbles[r] = Nibbles::load(rows[r].packed);
    for (int m = 0; m < kTokens; ++m) block[r][m] = Lanes::zero();
  }
#pragma GCC unroll 8
  for (int place = 0; place < 8; ++place) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Lanes values = mx_values(nibbles[r], place);
#pragma GCC unroll 4
      for (int m = 0; m < kTokens; ++m) {
        const Lanes right = Lanes::load(x + m * x_stride + place * kWidth);
        block[r][m] = multiply_add(values, right, block[r][m]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Lanes scale = mx_word_scales(rows[r].scale);
    for (int m = 0; m < kTokens; ++m) sums[r][m] = multiply_add(block[r][m], scale, sums[r][m]);
  }
}

// sums[r][m] = packed row r . arranged row m. The caller reads the rows `ahead` bytes further next.
template <int kRows, int kTokens>
inline void mx_dot_rows(const MxRow (&rows)[kRows], std::int64_t ahead, const float* x,
                        std::int64_t x_stride, std::int64_t columns,
                        float (&sums)[kRows][kTokens]) {
  Lanes partial[kRows][kTokens];
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < kTokens; ++m) partial[r][m] = Lanes::zero();
  }
  MxRow at[kRows];
  for (int r = 0; r < kRows; ++r) at[r] = rows[r];
  std::int64_t column = 0;
  for (; column + kMxChunk <= columns; column += kMxChunk) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) prefetch_far(at[r].packed + ahead);
    mx_multiply_chunk(at, x + column, x_stride, partial);
    for (int r = 0; r < kRows; ++r) {
      at[r].packed += kMxChunkBytes;
      at[r].scale += kMxChunkScales;
    }
  }
  if (column < columns) {
    // The last, shorter chunk, padded with zeros so that nothing beyond the row is read.
    std::uint8_t packed[kRows][kMxChunkBytes] = {};
    std::uint8_t scale[kRows][4] = {};
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(packed[r], at[r].packed, static_cast<std::size_t>((columns - column) / 2));
      std::memcpy(scale[r], at[r].scale,
                  static_cast<std::size_t>((columns - column) / kScaleBlock));
      at[r] = {packed[r], scale[r]};
    }
    mx_multiply_chunk(at, x + column, x_stride, partial);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < kTokens; ++m) sums[r][m] = sum_of(partial[r][m]);
  }
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
