// Products of many rows with expert weights: weights are repacked a panel at a time, in cache, and
// each panel meets all the rows at hand. That costs one expansion per panel, not per row.
//
// A *step* is what one multiply-add consumes along the reduced dimension: one fp32 element, or,
// where the machine multiplies bfloat16 pairs, two elements in one 32-bit word. Rows are packed
// eight by eight as [steps][8] and weights as [steps][2 * kWidth] columns.
#pragma once

#include "math/moe.h"
#include "math/mxfp4.h"
#include "math/packed.h"
#include "math/tiles.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

constexpr std::int64_t kPanelRows = 8;              // rows of x in a tile
constexpr std::int64_t kPanelColumns = 2 * kWidth;  // weight rows in a panel

// fp32 products, one element a step. Steps are 32-bit words in both forms.
struct FloatSteps {
  static constexpr std::int64_t kElements = 1;
};

// Pairs of bfloat16, accumulated in fp32; subnormal factors count as zero in this instruction.
struct PairSteps {
  static constexpr std::int64_t kElements = 2;
};

template <typename Steps>
constexpr std::int64_t steps_of(std::int64_t columns) {
  return (columns + Steps::kElements - 1) / Steps::kElements;
}

// ---- Rows --------------------------------------------------------------------------------------

// Writes elements [first, first + count) of row `row` of a tile; first is a multiple of a step, and
// the rest of a last, half-filled step becomes zero.
inline void pack_row(FloatSteps, const float* from, std::int64_t first, std::int64_t count,
                     std::int64_t row, std::uint32_t* tile) {
  for (std::int64_t i = 0; i < count; ++i) tile[(first + i) * kPanelRows + row] = bits_of(from[i]);
}

inline void pack_row(PairSteps, const float* from, std::int64_t first, std::int64_t count,
                     std::int64_t row, std::uint32_t* tile) {
  for (std::int64_t i = 0; i < count; i += 2) {
    const std::uint32_t low = bf16_from_float(from[i]);
    const std::uint32_t high = i + 1 < count ? bf16_from_float(from[i + 1]) : 0u;
    tile[(first + i) / 2 * kPanelRows + row] = low | high << 16;
  }
}

// ---- Panels ------------------------------------------------------------------------------------

constexpr std::int64_t kFetchWords = 16;

// 16 words of each of kWidth weight rows, word-major: tile[word * kWidth + row]. Rows beyond
// `rows` and bytes beyond `bytes` are zero and not read. The same words `ahead` bytes further are
// fetched for the next panel: so many streams at once are beyond the hardware's own prefetcher.
inline void fetch_words(const char* from, std::int64_t stride, std::int64_t rows,
                        std::int64_t bytes, std::int64_t ahead, float* tile) {
  for (std::int64_t r = 0; r < kWidth; ++r) prefetch_far(from + r * stride + ahead);
  char padded[kWidth * kFetchWords * 4];
  if (rows < kWidth || bytes < kFetchWords * 4) {
    std::memset(padded, 0, sizeof(padded));
    const std::int64_t here = bytes < kFetchWords * 4 ? bytes : kFetchWords * 4;
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(padded + r * kFetchWords * 4, from + r * stride, static_cast<std::size_t>(here));
    }
    from = padded;
    stride = kFetchWords * 4;
  }
#if defined(__AVX512F__)
  __m512 a[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * stride);
  transpose_16(a);
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(tile + i * kWidth, a[i]);
#else
  for (std::int64_t r = 0; r < kWidth; ++r) {
    for (std::int64_t word = 0; word < kFetchWords; ++word) {
      std::memcpy(tile + word * kWidth + r, from + r * stride + word * 4, 4);
    }
  }
#endif
}

inline Lanes low_halves(Lanes words) {  // bfloat16 in bits 0 to 15 as fp32
#if defined(__AVX512F__)
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words.value), 16))};
#elif defined(__AVX2__)
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words.value), 16))};
#else
  for (int i = 0; i < kWidth; ++i) {
    words.value[i] = float_from_bits(bits_of(words.value[i]) << 16);
  }
  return words;
#endif
}

inline Lanes high_halves(Lanes words) {  // bfloat16 in bits 16 to 31 as fp32
#if defined(__AVX512F__)
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(words.value), mask))};
#elif defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(words.value), mask))};
#else
  for (int i = 0; i < kWidth; ++i) {
    words.value[i] = float_from_bits(bits_of(words.value[i]) & 0xffff0000u);
  }
  return words;
#endif
}

inline Nibbles nibbles_of(const float* words) { return Nibbles::load(words); }

// Stores the pair (even, odd) of consecutive elements for kWidth weight rows, at element `at`.
inline void store_pair(FloatSteps, Lanes even, Lanes odd, std::int64_t at, float* panel) {
  even.store(panel + at * kPanelColumns);
  odd.store(panel + (at + 1) * kPanelColumns);
}

#if defined(__AVX512BF16__)
// Both values are exact in bfloat16, so that cutting off the lower halves loses nothing.
inline void store_pair(PairSteps, Lanes even, Lanes odd, std::int64_t at, float* panel) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.value), 16);
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i high = _mm512_and_si512(_mm512_castps_si512(odd.value), mask);
  _mm512_storeu_si512(panel + at / 2 * kPanelColumns, _mm512_or_si512(low, high));
}
#endif

// A block of kWidth consecutive rows of one expert's matrix.
struct WeightRows {
  WeightFormat format;
  const char* data;           // first row
  const std::uint8_t* scale;  // its scales, MXFP4 only
  std::int64_t columns;
  std::int64_t rows;   // of the kWidth; the rest count as zero
  std::int64_t ahead;  // rows from here to those that are needed next

  std::int64_t row_bytes() const {
    switch (format) {
      case WeightFormat::kFloat32:
        return 4 * columns;
      case WeightFormat::kBfloat16:
        return 2 * columns;
      case WeightFormat::kPacked:
        return packed_row_bytes(columns);
      case WeightFormat::kMxfp4:
        break;
    }
    return columns / 2;
  }
};

// Expands 16 words of every row to steps of `panel` from element `at` on.
template <typename Steps>
inline void expand_bfloat16(const float* words, std::int64_t count, std::int64_t at, float* panel) {
  for (std::int64_t w = 0; w < count; ++w) {
    const Lanes word = Lanes::load(words + w * kWidth);
    store_pair(Steps{}, low_halves(word), high_halves(word), at + 2 * w, panel);
  }
}

template <typename Steps>
inline void expand_mxfp4(const WeightRows& weights, const float* words, std::int64_t count,
                         std::int64_t at, float* panel) {
  constexpr std::int64_t kBlockWords = kScaleBlock / 8;
  const std::int64_t row_scales = weights.columns / kScaleBlock;
  for (std::int64_t w = 0; w < count; ++w) {
    float scales[kWidth] = {};
    const std::int64_t block = (at + 8 * w) / kScaleBlock;
    for (std::int64_t r = 0; r < weights.rows; ++r) {
      scales[r] = mx_scale(weights.scale[r * row_scales + block]);
    }
    const Lanes scale = Lanes::load(scales);
    for (const std::int64_t end = w + kBlockWords; w < end && w < count; ++w) {
      const Nibbles nibbles = nibbles_of(words + w * kWidth);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const Lanes even = mx_values(nibbles, 2 * pair) * scale;
        const Lanes odd = mx_values(nibbles, 2 * pair + 1) * scale;
        store_pair(Steps{}, even, odd, at + 8 * w + 2 * pair, panel);
      }
    }
    --w;
  }
}

// Steps that a panel has room for: expansion works in whole fetches.
template <typename Steps>
constexpr std::int64_t panel_steps(std::int64_t columns) {
  return steps_of<Steps>(round_up(columns, 8 * kFetchWords));
}

// Bytes of working memory that pack_panel_half takes.
constexpr std::int64_t unpacked_bytes(WeightFormat format, std::int64_t columns) {
  return format == WeightFormat::kPacked ? 2 * kWidth * columns : 0;
}

// The rows as bfloat16 in `memory`.
inline WeightRows unpack_rows(const WeightRows& packed, void* memory) {
  auto* to = static_cast<std::uint16_t*>(memory);
  for (std::int64_t r = 0; r < packed.rows; ++r) {
    const char* row = packed.data + r * packed.row_bytes();
    unpack_row(reinterpret_cast<const std::uint8_t*>(row), packed.columns, to + r * packed.columns);
  }
  WeightRows rows = packed;
  rows.format = WeightFormat::kBfloat16;
  rows.data = static_cast<const char*>(memory);
  rows.ahead = 0;
  return rows;
}

// Fills columns [0, kWidth) of `panel` from up to kWidth weight rows. `memory` has unpacked_bytes.
template <typename Steps>
inline void pack_panel_half(const WeightRows& stored, float* panel, void* memory) {
  const WeightRows weights =
      stored.format == WeightFormat::kPacked ? unpack_rows(stored, memory) : stored;
  const std::int64_t row_bytes = weights.row_bytes();
  float words[kFetchWords * kWidth];
  for (std::int64_t byte = 0; byte < row_bytes; byte += kFetchWords * 4) {
    const std::int64_t left = row_bytes - byte;
    fetch_words(weights.data + byte, row_bytes, weights.rows, left, weights.ahead * row_bytes,
                words);
    const std::int64_t count = left < kFetchWords * 4 ? (left + 3) / 4 : kFetchWords;
    switch (weights.format) {
      case WeightFormat::kFloat32:
        for (std::int64_t w = 0; w < count; ++w) {
          Lanes::load(words + w * kWidth).store(panel + (byte / 4 + w) * kPanelColumns);
        }
        break;
      case WeightFormat::kBfloat16:
        expand_bfloat16<Steps>(words, count, byte / 2, panel);
        break;
      case WeightFormat::kMxfp4:
        expand_mxfp4<Steps>(weights, words, count, 2 * byte, panel);
        break;
      case WeightFormat::kPacked:
        break;  // unpacked above
    }
  }
}

// ---- Tiles of the product ------------------------------------------------------------------

// sums[r][c]: rows [row, row + kRowTile) of a packed tile times both halves of a panel.
inline void multiply_panel(FloatSteps, const std::uint32_t* tile, std::int64_t row,
                           const float* panel, std::int64_t steps, Lanes (&sums)[kRowTile][2]) {
  clear_tile(sums);
  const float* rows = reinterpret_cast<const float*>(tile) + row;
  multiply_tile(sums, rows, kPanelRows, panel, kPanelColumns, steps);
}

#if defined(__AVX512BF16__)
inline void multiply_panel(PairSteps, const std::uint32_t* tile, std::int64_t row,
                           const float* panel, std::int64_t steps, Lanes (&sums)[kRowTile][2]) {
  clear_tile(sums);
  tile += row;
  for (std::int64_t step = 0; step < steps; ++step) {
    const __m512bh left = (__m512bh)_mm512_loadu_si512(panel);
    const __m512bh right = (__m512bh)_mm512_loadu_si512(panel + kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRowTile; ++r) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(tile[r]));
      sums[r][0].value = _mm512_dpbf16_ps(sums[r][0].value, left, x);
      sums[r][1].value = _mm512_dpbf16_ps(sums[r][1].value, right, x);
    }
    tile += kPanelRows;
    panel += kPanelColumns;
  }
}
#endif

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
