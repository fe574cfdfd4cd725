#!/usr/bin/env bash
# The kernels' tests against a library built with sanitizers. Called by `make sanitize`.
#
# usage: sanitize.sh [address,undefined | thread]      (python, cmake and ninja as on PATH)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
sanitizers=${1:-address,undefined}
build=build/sanitize-${sanitizers//,/-}

# Where a variable lives at each instruction costs the compiler minutes here, and a report needs lines.
cmake -S kernels -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_FLAGS=-fno-var-tracking -DHYBRIDGE_SANITIZE="$sanitizers"
cmake --build "$build"

# The interpreter is not instrumented, so the runtime must be loaded before it. libstdc++ comes along
# because the runtime intercepts exceptions of the library that it finds first.
case $sanitizers in
  thread) runtime=libtsan.so ;;
  *) runtime=libasan.so ;;
esac
preload="$(g++ -print-file-name="$runtime") $(g++ -print-file-name=libstdc++.so)"

# --capture=sys leaves file descriptor 2 alone, which is where a report goes.
# Python leaves memory to the system at exit: leaks would be its own, not the kernels'.
env LD_PRELOAD="$preload" \
  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 \
  HYBRIDGE_KERNELS_LIBRARY="$PWD/$build/libhybridge_kernels.so" \
  python -P -m pytest tests/kernels -q --capture=sys --dist=no -p no:cacheprovider
