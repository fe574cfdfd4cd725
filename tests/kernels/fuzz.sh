#!/usr/bin/env bash
# Builds the kernels under AddressSanitizer and UBSan and starts fuzz.py. Called by `make fuzz`.
#
# usage: fuzz.sh [--minutes M] [--seed S] [--call SEED:NUMBER]
#
# python, cmake and ninja are taken from PATH, as in sanitize.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=build/sanitize/address-undefined
bash tests/kernels/build_replay.sh address,undefined "$build" > /dev/null
# The checkout goes last: its own folders are no packages.
exec python -P -c 'import runpy, sys; sys.path.append("."); runpy.run_module("tests.kernels.fuzz", run_name="__main__")' \
  "$build" "$@"
