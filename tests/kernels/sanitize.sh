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
  bash tests/kernels/build_replay.sh "$sanitizers" "$build"
  echo "Replaying under $sanitizers:"
  "$build/replay" "$build/libhybridge_kernels.so" "$recording"
done
rm -f "$recording"
