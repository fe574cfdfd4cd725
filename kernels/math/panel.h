// The one register tile behind the matrix products of linear, the indexer and attention.
//
// A product of two row-major matrices whose rows both run along the summed dimension,
//   out[i, j] = sum_k rows[i, k] * vectors[j, k],
// reads `rows` where they lie, word by word (broadcast to all lanes), and `vectors` from a packed
// copy, the panel: [step][lane], so that lane j holds vector j. A word is what one step consumes of
// a row: one float, or a pair of bfloat16 for the machines that multiply pairs (vdpbf16ps).
//
// vdpbf16ps adds the two exact products of a pair to a float32 sum, rounding to nearest at each of
// the two additions, and takes subnormal inputs and results as zero.
#pragma once

#include <cstdint>

#include "math/lanes.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

// Vectors (of kWidth lanes) that a panel is at most wide: with kRowTile rows, the accumulators fit
// the register file.
constexpr int kPanelVectors = 2;
constexpr std::int64_t kPanelLanes = kPanelVectors * kWidth;

constexpr std::int64_t kWordBytes = 4;
constexpr std::int64_t kLineWords = 16;  // in a cache line

// Products of float32 words.
struct FloatWords {
  using Element = float;
  static constexpr int kElements = 1;  // in a word

  static Lanes accumulate(Lanes sum, const float* word, Lanes panel) {
    return multiply_add(Lanes::broadcast(*word), panel, sum);
  }
};

#if defined(__AVX512BF16__)
// Products of bfloat16 pairs.
struct PairWords {
  using Element = std::uint16_t;
  static constexpr int kElements = 2;

  static Lanes accumulate(Lanes sum, const std::uint16_t* word, Lanes panel) {
    std::int32_t bits;
    std::memcpy(&bits, word, sizeof(bits));
    return {_mm512_dpbf16_ps(sum.value, (__m512bh)_mm512_set1_epi32(bits),
                             (__m512bh)_mm512_castps_si512(panel.value))};
  }
};
#endif

inline float pair_word(float first, float second) {
  return float_from_bits(static_cast<std::uint32_t>(bf16_from_float(first)) |
                         static_cast<std::uint32_t>(bf16_from_float(second)) << 16);
}

template <class Words>
constexpr std::int64_t steps_of(std::int64_t elements) {
  return (elements + Words::kElements - 1) / Words::kElements;
}

// Lanes of the panel that holds `vectors` vectors: whole Lanes, at most kPanelLanes.
constexpr std::int64_t panel_lanes(std::int64_t vectors) {
  return vectors >= kPanelLanes ? kPanelLanes : round_up(vectors, kWidth);
}

// Rows that will be read next, one for each row being multiplied: fetched into the cache at the
// same pace. kRowTile rows read side by side are more streams than the hardware follows well, and
// rows of a paged cache are where it cannot guess. nullptr: fetch nothing.
using RowsAhead = const char* const*;

// sums[i][v] += sum over steps of word(rows[i] + step * row_step) * panel[step * lanes + v lanes].
// `row_step` is in elements; it is the elements of a word where rows are contiguous.
template <class Words, int kVectors, bool kFetch = false>
inline void multiply_panel(const typename Words::Element* const* rows, std::int64_t row_step,
                           const float* panel, std::int64_t lanes, std::int64_t steps,
                           Lanes (&sums)[kRowTile][kVectors], RowsAhead ahead = nullptr) {
  const typename Words::Element* row[kRowTile];
  Lanes sum[kRowTile][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRowTile; ++i) {
    row[i] = rows[i];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[i][v] = sums[i][v];
  }
  for (std::int64_t step = 0, at = 0; step < steps; ++step, at += row_step, panel += lanes) {
    if (kFetch && step % kLineWords == 0) {
#pragma GCC unroll 8
      for (int i = 0; i < kRowTile; ++i) prefetch(ahead[i] + step * kWordBytes);
    }
    Lanes right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = Lanes::load(panel + v * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kRowTile; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = Words::accumulate(sum[i][v], row[i] + at, right[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRowTile; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[i][v] = sum[i][v];
  }
}

// The same for whole rows of `elements` elements, an odd last one included.
template <class Words, int kVectors, bool kFetch = false>
inline void multiply_panel_rows(const typename Words::Element* const* rows, const float* panel,
                                std::int64_t lanes, std::int64_t elements,
                                Lanes (&sums)[kRowTile][kVectors], RowsAhead ahead = nullptr) {
  const std::int64_t whole = elements / Words::kElements;
  multiply_panel<Words, kVectors, kFetch>(rows, Words::kElements, panel, lanes, whole, sums, ahead);
  if (whole * Words::kElements == elements) return;
  typename Words::Element last[kRowTile][2] = {};
  const typename Words::Element* padded[kRowTile];
  for (int i = 0; i < kRowTile; ++i) {
    last[i][0] = rows[i][elements - 1];
    padded[i] = last[i];
  }
  multiply_panel<Words, kVectors>(padded, 0, panel + whole * lanes, lanes, 1, sums);
}

template <int kVectors>
inline void clear_sums(Lanes (&sums)[kRowTile][kVectors]) {
#pragma GCC unroll 8
  for (int i = 0; i < kRowTile; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[i][v] = Lanes::zero();
  }
}

// ---- Packing ----------------------------------------------------------------------------------

#if defined(__AVX512F__)
// Transposes a 16 x 16 block of 4-byte words in registers.
inline void transpose_words(__m512i (&a)[16]) {
  __m512i b[16];
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
}

inline __m512i words_at(const float* from, FloatWords) { return _mm512_loadu_si512(from); }
#if defined(__AVX512BF16__)
inline __m512i words_at(const float* from, PairWords) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from));
}
#endif
#endif

// One word of a float row as the panel holds it.
inline float packed_word(const float* from, std::int64_t, FloatWords) { return *from; }
#if defined(__AVX512BF16__)
inline float packed_word(const float* from, std::int64_t count, PairWords) {
  return pair_word(from[0], count > 1 ? from[1] : 0.0f);
}
#endif

// Packs `count` <= kPanelLanes float vectors of `elements` elements, `stride` apart, into a panel
// of panel_lanes(count) lanes; spare lanes are zero.
template <class Words>
inline void pack_panel(const float* vectors, std::int64_t stride, std::int64_t count,
                       std::int64_t elements, float* panel) {
  const std::int64_t lanes = panel_lanes(count);
  const std::int64_t steps = steps_of<Words>(elements);
  std::int64_t packed_steps = 0;
#if defined(__AVX512F__)
  packed_steps = elements / (16 * Words::kElements) * 16;
  for (std::int64_t lane = 0; lane < lanes; lane += 16) {
    const std::int64_t filled = count - lane < 16 ? count - lane : 16;
    for (std::int64_t step = 0; step < packed_steps; step += 16) {
      __m512i block[16];
      for (std::int64_t i = 0; i < 16; ++i) {
        const float* from = vectors + (lane + i) * stride + step * Words::kElements;
        block[i] = i < filled ? words_at(from, Words()) : _mm512_setzero_si512();
      }
      transpose_words(block);
      for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(panel + (step + i) * lanes + lane, block[i]);
      }
    }
  }
#endif
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    for (std::int64_t step = packed_steps; step < steps; ++step) {
      const std::int64_t at = step * Words::kElements;
      panel[step * lanes + lane] =
          lane < count ? packed_word(vectors + lane * stride + at, elements - at, Words()) : 0.0f;
    }
  }
}

// ---- Rows in the form that a product reads --------------------------------------------------

inline void widen_row(const std::uint16_t* from, std::int64_t elements, float* to) {
  std::int64_t i = 0;
  for (; i + kWidth <= elements; i += kWidth) Lanes::load_bf16(from + i).store(to + i);
  for (; i < elements; ++i) to[i] = float_from_bf16(from[i]);
}
inline void widen_row(const float* from, std::int64_t elements, float* to) {
  std::memcpy(to, from, static_cast<std::size_t>(elements) * sizeof(float));
}

// How rows of type Stored are multiplied: as they lie, or widened to float first.
template <class Stored>
struct RowsAs {
  using Words = FloatWords;
};
#if defined(__AVX512BF16__)
template <>
struct RowsAs<std::uint16_t> {
  using Words = PairWords;
};
#endif

// Whether rows of type Stored must be widened before a product of Words.
template <class Stored, class Words = typename RowsAs<Stored>::Words>
constexpr bool kWidened = sizeof(Stored) != sizeof(typename Words::Element);

// Makes kRowTile pointers to rows that the product can read: the rows themselves, or float copies
// in `buffer` ([kRowTile, elements], used if kWidened). The last of `count` rows stands in for
// those beyond it.
template <class Stored, class Element>
inline void readable_rows(const Stored* const* rows, std::int64_t count, std::int64_t elements,
                          float* buffer, const Element** readable) {
  for (std::int64_t i = 0; i < kRowTile; ++i) {
    const std::int64_t source = i < count ? i : count - 1;
    if constexpr (sizeof(Stored) != sizeof(Element)) {
      if (i < count) widen_row(rows[i], elements, buffer + i * elements);
      readable[i] = buffer + source * elements;
    } else {
      readable[i] = rows[source];
    }
  }
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
