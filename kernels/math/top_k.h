// Exact selection of the k largest of n scores; of equal scores the lowest positions.
#pragma once

#include <cstdint>
#include <cstring>

#include "math/lanes.h"

namespace hybridge {
namespace HYBRIDGE_ISA {

// A float's place among floats as an unsigned integer; a NaN has none.
inline std::uint32_t order_of(float score) {
  const std::uint32_t bits = bits_of(score);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}

// The orders of n scores. Returns false if one is NaN. A score of -0 must have been made +0.
inline bool orders_of(const float* scores, std::int64_t n, std::uint32_t* orders) {
  std::uint32_t nan_seen = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t bits = bits_of(scores[i]);
    nan_seen |= (bits & 0x7fffffffu) > 0x7f800000u ? 1u : 0u;
    const std::uint32_t negative =
        static_cast<std::uint32_t>(static_cast<std::int32_t>(bits) >> 31);
    orders[i] = bits ^ (negative | 0x80000000u);
  }
  return nan_seen == 0;
}

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

// counts[d] = how many of n orders have digit d at `shift`.
inline void count_digits(const std::uint32_t* orders, std::int64_t n, int shift,
                         std::uint32_t (&counts)[kDigits]) {
  // Two tables, so that equal neighbours do not wait for each other.
  std::uint32_t second[kDigits];
  std::memset(counts, 0, sizeof counts);
  std::memset(second, 0, sizeof second);
  std::int64_t i = 0;
  for (; i + 2 <= n; i += 2) {
    ++counts[(orders[i] >> shift) & (kDigits - 1)];
    ++second[(orders[i + 1] >> shift) & (kDigits - 1)];
  }
  if (i < n) ++counts[(orders[i] >> shift) & (kDigits - 1)];
  for (int d = 0; d < kDigits; ++d) counts[d] += second[d];
}

// Keeps those of n orders whose digit at `shift` is `digit`; `to` may be `from`. Returns their
// number.
inline std::int64_t keep_digit(const std::uint32_t* from, std::int64_t n, int shift,
                               std::uint32_t digit, std::uint32_t* to) {
  std::int64_t kept = 0;
  std::int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i wanted = _mm512_set1_epi32(static_cast<int>(digit));
  const __m512i mask = _mm512_set1_epi32(kDigits - 1);
  for (; i + 16 <= n; i += 16) {
    const __m512i block = _mm512_loadu_si512(from + i);
    const __m512i digits =
        _mm512_and_si512(_mm512_srl_epi32(block, _mm_cvtsi32_si128(shift)), mask);
    const __mmask16 equal = _mm512_cmpeq_epi32_mask(digits, wanted);
    const int count = __builtin_popcount(equal);
    // At most i + 16 words have been written, so a whole store stays behind what is yet to be read.
    _mm512_storeu_si512(to + kept, _mm512_maskz_compress_epi32(equal, block));
    kept += count;
  }
#endif
  for (; i < n; ++i) {
    to[kept] = from[i];
    kept += ((from[i] >> shift) & (kDigits - 1)) == digit ? 1 : 0;
  }
  return kept;
}

// The k-th largest of n orders (1 <= k <= n), and in `equal` how many of that value belong to the
// k largest. `work` holds n + 16 words. Radix selection, 11 bits at a time from the top.
inline std::uint32_t kth_largest(const std::uint32_t* orders, std::int64_t n, std::int64_t k,
                                 std::uint32_t* work, std::int64_t* equal) {
  std::uint32_t counts[kDigits];
  std::uint32_t value = 0;
  // Shifts 21, 10 and 0: the last digit overlaps the second by one bit, which is then the same in
  // all that are left.
  constexpr int shifts[] = {21, 10, 0};
  for (int shift : shifts) {
    count_digits(orders, n, shift, counts);
    int digit = kDigits - 1;
    while (counts[digit] < k) k -= counts[digit--];
    value |= static_cast<std::uint32_t>(digit) << shift;
    n = keep_digit(orders, n, shift, static_cast<std::uint32_t>(digit), work);
    orders = work;
  }
  *equal = k;
  return value;
}

// Writes the positions, ascending, of the orders above `threshold` and of the first `equal` ones at
// it: exactly k in all.
inline void positions_from(const std::uint32_t* orders, std::int64_t n, std::uint32_t threshold,
                           std::int64_t equal, std::int32_t* out, std::int64_t k) {
  std::int64_t written = 0;
  std::int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(threshold));
  __m512i position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n && written < k; i += 16) {
    const __m512i block = _mm512_loadu_si512(orders + i);
    unsigned chosen = _mm512_cmpgt_epu32_mask(block, limit);
    unsigned ties = _mm512_cmpeq_epi32_mask(block, limit);
    for (; ties != 0 && equal > 0; ties &= ties - 1, --equal) chosen |= ties & (0u - ties);
    const int count = __builtin_popcount(chosen);
    const __m512i packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(chosen), position);
    _mm512_mask_storeu_epi32(out + written, static_cast<__mmask16>((1u << count) - 1u), packed);
    written += count;
    position = _mm512_add_epi32(position, _mm512_set1_epi32(16));
  }
#endif
  for (; i < n && written < k; ++i) {
    const bool tie = orders[i] == threshold && equal > 0;
    equal -= tie ? 1 : 0;
    if (tie || orders[i] > threshold) out[written++] = static_cast<std::int32_t>(i);
  }
}

// Writes to out[k] the positions of the k largest of n scores, n > k, ascending. `orders` and
// `work` hold n + 16 words each. Returns false, with nothing written, if a score is NaN.
inline bool select_top_k(const float* scores, std::int64_t n, std::int64_t k, std::uint32_t* orders,
                         std::uint32_t* work, std::int32_t* out) {
  if (!orders_of(scores, n, orders)) return false;
  std::int64_t equal = 0;
  const std::uint32_t threshold = kth_largest(orders, n, k, work, &equal);
  positions_from(orders, n, threshold, equal, out, k);
  return true;
}

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
