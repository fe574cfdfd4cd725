// One fp32 vector type per instruction set, with just the operations the math kernels need.
//
// A kernel source includes this header and is compiled several times with different compiler flags.
// Everything here lives in a namespace named after the instruction set, so that the copies never
// meet in the linker. `kWidth` lanes make a vector; `kRowTile` x 2 vectors are the accumulators
// that fit the register file with room for operands.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
// gcc 12 takes the deliberately undefined operands in this header for mistakes (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if defined(__AVX512BF16__)
#define HYBRIDGE_ISA avx512_bf16
#elif defined(__AVX512F__)
#define HYBRIDGE_ISA avx512
#elif defined(__AVX2__)
#define HYBRIDGE_ISA avx2
#else
#define HYBRIDGE_ISA plain
#endif

namespace hybridge {
namespace HYBRIDGE_ISA {

inline float float_from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_from_bf16(std::uint16_t value) {
  return float_from_bits(static_cast<std::uint32_t>(value) << 16);
}

// Rounds to nearest even; NaN stays NaN.
inline std::uint16_t bf16_from_float(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)

constexpr int kWidth = 16;
constexpr int kRowTile = 8;

struct Lanes {
  __m512 value;
  static Lanes zero() { return {_mm512_setzero_ps()}; }
  static Lanes broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Lanes load_bf16(const std::uint16_t* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  void store(float* to) const { _mm512_storeu_ps(to, value); }
};

inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.value, b.value)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.value, b.value)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.value, b.value)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.value, b.value)}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
  return {_mm512_fmadd_ps(a.value, b.value, c.value)};
}
inline Lanes negative_multiply_add(Lanes a, Lanes b, Lanes c) {
  return {_mm512_fnmadd_ps(a.value, b.value, c.value)};
}
// NaN in b survives maximum and minimum: the hardware returns its second operand.
inline Lanes maximum(Lanes a, Lanes b) { return {_mm512_max_ps(a.value, b.value)}; }
inline Lanes minimum(Lanes a, Lanes b) { return {_mm512_min_ps(a.value, b.value)}; }
inline Lanes absolute(Lanes a) { return {_mm512_abs_ps(a.value)}; }
inline Lanes square_root(Lanes a) { return {_mm512_sqrt_ps(a.value)}; }
inline Lanes nearest(Lanes a) { return {_mm512_roundscale_ps(a.value, 0)}; }
inline Lanes copy_sign(Lanes magnitude, Lanes sign) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  return {_mm512_castsi512_ps(
      _mm512_or_si512(_mm512_castps_si512(magnitude.value),
                      _mm512_and_si512(mask, _mm512_castps_si512(sign.value))))};
}
inline Lanes select_less(Lanes a, Lanes b, Lanes if_less, Lanes otherwise) {
  const __mmask16 less = _mm512_cmp_ps_mask(a.value, b.value, _CMP_LT_OQ);
  return {_mm512_mask_blend_ps(less, otherwise.value, if_less.value)};
}
inline Lanes scale_by_power(Lanes a, Lanes exponent) {
  return {_mm512_scalef_ps(a.value, exponent.value)};
}
inline float sum_of(Lanes a) { return _mm512_reduce_add_ps(a.value); }

#elif defined(__AVX2__)

constexpr int kWidth = 8;
constexpr int kRowTile = 4;

struct Lanes {
  __m256 value;
  static Lanes zero() { return {_mm256_setzero_ps()}; }
  static Lanes broadcast(float x) { return {_mm256_set1_ps(x)}; }
  static Lanes load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Lanes load_bf16(const std::uint16_t* from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  void store(float* to) const { _mm256_storeu_ps(to, value); }
};

inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.value, b.value)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.value, b.value)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.value, b.value)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.value, b.value)}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.value, b.value, c.value)};
}
inline Lanes negative_multiply_add(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fnmadd_ps(a.value, b.value, c.value)};
}
// NaN in b survives maximum and minimum: the hardware returns its second operand.
inline Lanes maximum(Lanes a, Lanes b) { return {_mm256_max_ps(a.value, b.value)}; }
inline Lanes minimum(Lanes a, Lanes b) { return {_mm256_min_ps(a.value, b.value)}; }
inline Lanes absolute(Lanes a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.value)}; }
inline Lanes square_root(Lanes a) { return {_mm256_sqrt_ps(a.value)}; }
inline Lanes nearest(Lanes a) {
  return {_mm256_round_ps(a.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Lanes copy_sign(Lanes magnitude, Lanes sign) {
  return {_mm256_or_ps(magnitude.value, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign.value))};
}
inline Lanes select_less(Lanes a, Lanes b, Lanes if_less, Lanes otherwise) {
  return {_mm256_blendv_ps(otherwise.value, if_less.value,
                           _mm256_cmp_ps(a.value, b.value, _CMP_LT_OQ))};
}
inline __m256 power_of_two(__m256i exponent) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}
// Two steps, so that results in the subnormal range round once and are not lost.
inline Lanes scale_by_power(Lanes a, Lanes exponent) {
  const __m256i whole = _mm256_cvtps_epi32(exponent.value);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256 first = _mm256_mul_ps(a.value, power_of_two(half));
  return {_mm256_mul_ps(first, power_of_two(_mm256_sub_epi32(whole, half)))};
}
inline float sum_of(Lanes a) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(a.value), _mm256_extractf128_ps(a.value, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

#else

// Four lanes of compiler vectors: SSE2 on x86-64, NEON on ARM, scalars elsewhere.
constexpr int kWidth = 4;
constexpr int kRowTile = 4;

struct Lanes {
  typedef float Vector __attribute__((vector_size(16)));
  Vector value;
  static Lanes zero() { return broadcast(0.0f); }
  static Lanes broadcast(float x) { return {Vector{x, x, x, x}}; }
  static Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes.value, from, sizeof(lanes.value));
    return lanes;
  }
  static Lanes load_bf16(const std::uint16_t* from) {
    return {Vector{float_from_bf16(from[0]), float_from_bf16(from[1]), float_from_bf16(from[2]),
                   float_from_bf16(from[3])}};
  }
  void store(float* to) const { std::memcpy(to, &value, sizeof(value)); }
};

template <typename Function>
inline Lanes each_lane(Lanes a, Function function) {
  for (int lane = 0; lane < kWidth; ++lane) a.value[lane] = function(a.value[lane]);
  return a;
}

inline Lanes operator+(Lanes a, Lanes b) { return {a.value + b.value}; }
inline Lanes operator-(Lanes a, Lanes b) { return {a.value - b.value}; }
inline Lanes operator*(Lanes a, Lanes b) { return {a.value * b.value}; }
inline Lanes operator/(Lanes a, Lanes b) { return {a.value / b.value}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return {a.value * b.value + c.value}; }
inline Lanes negative_multiply_add(Lanes a, Lanes b, Lanes c) {
  return {c.value - a.value * b.value};
}
// NaN in b survives maximum and minimum, as it does on x86.
inline Lanes maximum(Lanes a, Lanes b) {
  for (int lane = 0; lane < kWidth; ++lane) {
    b.value[lane] = a.value[lane] > b.value[lane] ? a.value[lane] : b.value[lane];
  }
  return b;
}
inline Lanes minimum(Lanes a, Lanes b) {
  for (int lane = 0; lane < kWidth; ++lane) {
    b.value[lane] = a.value[lane] < b.value[lane] ? a.value[lane] : b.value[lane];
  }
  return b;
}
inline Lanes absolute(Lanes a) {
  return each_lane(a, [](float x) { return std::fabs(x); });
}
inline Lanes square_root(Lanes a) {
  return each_lane(a, [](float x) { return std::sqrt(x); });
}
inline Lanes nearest(Lanes a) {
  return each_lane(a, [](float x) { return std::nearbyint(x); });
}
inline Lanes copy_sign(Lanes magnitude, Lanes sign) {
  for (int lane = 0; lane < kWidth; ++lane) {
    magnitude.value[lane] = std::copysign(magnitude.value[lane], sign.value[lane]);
  }
  return magnitude;
}
inline Lanes select_less(Lanes a, Lanes b, Lanes if_less, Lanes otherwise) {
  for (int lane = 0; lane < kWidth; ++lane) {
    if (a.value[lane] < b.value[lane]) otherwise.value[lane] = if_less.value[lane];
  }
  return otherwise;
}
// exponent is a whole number within [-150, 128] here, or NaN.
inline Lanes scale_by_power(Lanes a, Lanes exponent) {
  for (int lane = 0; lane < kWidth; ++lane) {
    const float power = exponent.value[lane];
    if (power == power) a.value[lane] = std::ldexp(a.value[lane], static_cast<int>(power));
  }
  return a;
}
inline float sum_of(Lanes a) { return (a.value[0] + a.value[2]) + (a.value[1] + a.value[3]); }

#endif

// The first `count` lanes from memory, the rest zero; no byte beyond them is read.
inline Lanes load_first(const float* from, std::int64_t count) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1u);
  return {_mm512_maskz_loadu_ps(mask, from)};
#else
  float padded[kWidth] = {};
  for (std::int64_t lane = 0; lane < count; ++lane) padded[lane] = from[lane];
  return Lanes::load(padded);
#endif
}

inline Lanes load_first_bf16(const std::uint16_t* from, std::int64_t count) {
  std::uint16_t padded[kWidth] = {};
  for (std::int64_t lane = 0; lane < count; ++lane) padded[lane] = from[lane];
  return Lanes::load_bf16(padded);
}

inline void store_first(float* to, Lanes lanes, std::int64_t count) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1u);
  _mm512_mask_storeu_ps(to, mask, lanes.value);
#else
  float padded[kWidth];
  lanes.store(padded);
  for (std::int64_t lane = 0; lane < count; ++lane) to[lane] = padded[lane];
#endif
}

// `count` may be a whole vector here.
inline Lanes load_first_or_all(const float* from, std::int64_t count) {
  return count >= kWidth ? Lanes::load(from) : load_first(from, count);
}

inline void store_first_or_all(float* to, Lanes lanes, std::int64_t count) {
  if (count >= kWidth) {
    lanes.store(to);
  } else {
    store_first(to, lanes, count);
  }
}

// Loads of either weight type by one name, so that kernels can be templates over it.
inline Lanes load_lanes(const float* from) { return Lanes::load(from); }
inline Lanes load_lanes(const std::uint16_t* from) { return Lanes::load_bf16(from); }
inline Lanes load_lanes(const float* from, std::int64_t count) { return load_first(from, count); }
inline Lanes load_lanes(const std::uint16_t* from, std::int64_t count) {
  return load_first_bf16(from, count);
}
inline float load_scalar(const float* from) { return *from; }
inline float load_scalar(const std::uint16_t* from) { return float_from_bf16(*from); }

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

// Into the second cache level, for what is needed well after the loads at hand. The address may lie
// outside any object.
inline void prefetch_far(const void* address) { __builtin_prefetch(address, 0, 2); }

constexpr std::int64_t round_up(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// ---- Elementary functions -------------------------------------------------------------------

// exp(x) to about 1 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, and a degree-6 polynomial for exp(r).
// Below -104 the result is 0, above 88.8 infinity; NaN stays NaN.
inline Lanes exponential(Lanes x) {
  x = maximum(Lanes::broadcast(-104.0f), minimum(Lanes::broadcast(89.0f), x));
  const Lanes n = nearest(x * Lanes::broadcast(1.44269504088896341f));
  Lanes r = negative_multiply_add(n, Lanes::broadcast(0.693359375f), x);
  r = negative_multiply_add(n, Lanes::broadcast(-2.12194440e-4f), r);
  Lanes p = Lanes::broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, Lanes::broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, Lanes::broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, Lanes::broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, Lanes::broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, Lanes::broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + Lanes::broadcast(1.0f));
  return scale_by_power(p, n);
}

inline Lanes sigmoid(Lanes x) {
  const Lanes one = Lanes::broadcast(1.0f);
  return one / (one + exponential(Lanes::zero() - x));
}

// log(1 + u) for 0 <= u <= 1, as 2 atanh(s) with s = u / (2 + u) <= 1/3: no bits to pull apart, and
// small u keeps its relative accuracy. The first dropped term is below 2 s^17 / 17 = 1e-9.
inline Lanes log_one_plus(Lanes u) {
  const Lanes s = u / (u + Lanes::broadcast(2.0f));
  const Lanes square = s * s;
  Lanes series = Lanes::broadcast(1.0f / 15.0f);
  series = multiply_add(series, square, Lanes::broadcast(1.0f / 13.0f));
  series = multiply_add(series, square, Lanes::broadcast(1.0f / 11.0f));
  series = multiply_add(series, square, Lanes::broadcast(1.0f / 9.0f));
  series = multiply_add(series, square, Lanes::broadcast(1.0f / 7.0f));
  series = multiply_add(series, square, Lanes::broadcast(1.0f / 5.0f));
  series = multiply_add(series, square, Lanes::broadcast(1.0f / 3.0f));
  series = multiply_add(series, square, Lanes::broadcast(1.0f));
  return (s + s) * series;
}

// max(x, 0) + log(1 + exp(-|x|)) never overflows.
inline Lanes softplus(Lanes x) {
  return maximum(Lanes::zero(), x) + log_one_plus(exponential(Lanes::zero() - absolute(x)));
}

// An odd polynomial where 1 - exp(-2|x|) would cancel, the exponential elsewhere.
inline Lanes hyperbolic_tangent(Lanes x) {
  const Lanes size = absolute(x);
  const Lanes square = x * x;
  Lanes p = Lanes::broadcast(-5.70498872745e-3f);
  p = multiply_add(p, square, Lanes::broadcast(2.06390887954e-2f));
  p = multiply_add(p, square, Lanes::broadcast(-5.37397155531e-2f));
  p = multiply_add(p, square, Lanes::broadcast(1.33314422036e-1f));
  p = multiply_add(p, square, Lanes::broadcast(-3.33332819422e-1f));
  const Lanes small = multiply_add(p * square, x, x);
  const Lanes one = Lanes::broadcast(1.0f);
  const Lanes decay = exponential(Lanes::broadcast(-2.0f) * size);
  const Lanes large = copy_sign((one - decay) / (one + decay), x);
  return select_less(size, Lanes::broadcast(0.625f), small, large);
}

inline Lanes silu(Lanes x) { return x * sigmoid(x); }

}  // namespace HYBRIDGE_ISA
}  // namespace hybridge
