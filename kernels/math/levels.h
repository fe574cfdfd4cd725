// Instruction-set levels. Every math/*.cpp is compiled once per level, with HYBRIDGE_ISA naming
// the namespace its functions land in; a kernel picks one function when it is created.
//
//   math/rms_norm.h     struct RmsNormArgs {...};
//                       HYBRIDGE_DECLARE_LEVELS(rms_norm, void(const RmsNormArgs&, const
//                       Parallel&))
//   math/rms_norm.cpp   namespace hybridge::HYBRIDGE_ISA { void rms_norm(...) {...} }
//   ops/rms_norm.cpp    auto* run = select_rms_norm();
//
// Code in math/*.cpp lives in hybridge::HYBRIDGE_ISA or in an unnamed namespace, so that no
// function compiled for a newer machine can stand in for one of an older machine. For the same
// reason the objects are linked in ascending order of level (the linker keeps the first of several
// equal inline functions of the standard library).
#pragma once

namespace hybridge {

enum class Level : int { plain = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

// The level to use now: the machine's, lowered by HYBRIDGE_KERNEL_LEVEL if that is set.
// Raises OpError if the variable holds no level's name.
Level active_level();
const char* level_name(Level level);

template <class Signature>
Signature* pick(Signature* plain, Signature* avx2, Signature* avx512, Signature* avx512_bf16) {
  switch (active_level()) {
    case Level::avx512_bf16:
      return avx512_bf16;
    case Level::avx512:
      return avx512;
    case Level::avx2:
      return avx2;
    case Level::plain:
      break;
  }
  return plain;
}

}  // namespace hybridge

#if defined(__x86_64__)
#define HYBRIDGE_DECLARE_LEVELS(function, ...)                                             \
  namespace plain {                                                                        \
  using function##_signature = __VA_ARGS__;                                                \
  function##_signature function;                                                           \
  }                                                                                        \
  namespace avx2 {                                                                         \
  plain::function##_signature function;                                                    \
  }                                                                                        \
  namespace avx512 {                                                                       \
  plain::function##_signature function;                                                    \
  }                                                                                        \
  namespace avx512_bf16 {                                                                  \
  plain::function##_signature function;                                                    \
  }                                                                                        \
  [[maybe_unused]] static inline plain::function##_signature* select_##function() {        \
    return pick(plain::function, avx2::function, avx512::function, avx512_bf16::function); \
  }
#else
#define HYBRIDGE_DECLARE_LEVELS(function, ...)                                      \
  namespace plain {                                                                 \
  using function##_signature = __VA_ARGS__;                                         \
  function##_signature function;                                                    \
  }                                                                                 \
  [[maybe_unused]] static inline plain::function##_signature* select_##function() { \
    return plain::function;                                                         \
  }
#endif
