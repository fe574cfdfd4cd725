#!/usr/bin/env bash
# Builds the kernel library and replay.cpp under sanitizers, for sanitize.sh and fuzz.sh.
#
# usage: build_replay.sh SANITIZERS FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cmake -S kernels -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHYBRIDGE_SANITIZE="$1"
cmake --build "$2"
${CXX:-c++} -std=c++17 -O1 -g1 -fsanitize="$1" -fno-sanitize-recover=all -Ikernels \
  tests/kernels/replay.cpp -o "$2/replay" -ldl -pthread
