#!/usr/bin/env bash
# The calls that the kernels' tests make, run again under sanitizers. Called by `make sanitize`.
#
# usage: sanitize.sh [SANITIZERS ...]     (default: address,undefined thread)
#
# python, cmake and ninja are taken from PATH, the library to record with as the tests take it. The
# tests run once, without a sanitizer, and record every call (recording.py). replay.cpp then calls
# the instrumented library, with no Python and no onnxruntime in the process: those are not
# instrumented, so that a report about them would mean nothing, and a race with them goes unseen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -gt 0 ] || set -- address,undefined thread
recording=$PWD/build/sanitize/calls
mkdir -p build/sanitize
rm -f "$recording"
HYBRIDGE_RECORD=$recording python -P -m pytest tests/kernels -q --dist=no -p no:cacheprovider

for sanitizers; do
  build=build/sanitize/${sanitizers//,/-}
  cmake -S kernels -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHYBRIDGE_SANITIZE="$sanitizers"
  cmake --build "$build"
  ${CXX:-c++} -std=c++17 -O1 -g1 -fsanitize="$sanitizers" -fno-sanitize-recover=all -Ikernels \
    tests/kernels/replay.cpp -o "$build/replay" -ldl -pthread
  echo "Replaying under $sanitizers:"
  UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
    "$build/replay" "$build/libhybridge_kernels.so" "$recording"
done
rm -f "$recording"
