#include <cstdlib>
#include <string>

#include "framework/error.h"
#include "math/levels.h"

namespace hybridge {
namespace {

constexpr Level kLevels[] = {Level::plain, Level::avx2, Level::avx512, Level::avx512_bf16};

Level machine_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Level::plain;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return Level::avx2;
  return __builtin_cpu_supports("avx512bf16") ? Level::avx512_bf16 : Level::avx512;
#else
  return Level::plain;
#endif
}

Level parse_level(const std::string& name) {
  for (Level level : kLevels) {
    if (name == level_name(level)) return level;
  }
  throw OpError("environment variable HYBRIDGE_KERNEL_LEVEL",
                text("no level is called '", name, "'"),
                "use plain, avx2, avx512 or avx512_bf16, or unset it");
}

}  // namespace

const char* level_name(Level level) {
  constexpr const char* names[] = {"plain", "avx2", "avx512", "avx512_bf16"};
  return names[static_cast<int>(level)];
}

Level active_level() {
  static const Level machine = machine_level();
  const char* wanted = std::getenv("HYBRIDGE_KERNEL_LEVEL");
  if (wanted == nullptr || *wanted == '\0') return machine;
  const Level level = parse_level(wanted);
  return level < machine ? level : machine;
}

}  // namespace hybridge
