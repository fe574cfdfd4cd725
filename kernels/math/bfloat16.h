// bfloat16: the upper half of a float32.
#pragma once

#include <cstdint>
#include <cstring>

namespace hybridge {

struct bfloat16 {
  uint16_t bits;
};

static inline float to_float(bfloat16 x) {
  const uint32_t word = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

static inline float to_float(float x) { return x; }

// Rounds to nearest, ties to even; a NaN stays a (quiet) NaN.
static inline bfloat16 to_bfloat16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  if ((word & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((word >> 16) | 0x40u)};
  }
  word += 0x7fffu + ((word >> 16) & 1u);
  return {static_cast<uint16_t>(word >> 16)};
}

}  // namespace hybridge
