#!/usr/bin/env bash
# The whole line on a small random model: make, compile, inspect, run, verify. Called by `make demo`.
#
# usage: demo.sh HYBRIDGE FOLDER
set -euo pipefail
hybridge=$1
folder=$2
checkpoint=$folder/checkpoint
artifact=$folder/artifact
rm -rf "$checkpoint" "$artifact"
mkdir -p "$folder"

bold='' plain=''
if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
show() {
  printf '$ hybridge %s\n' "$*"
  "$hybridge" "$@"
}

say '1. A small random K3.1 checkpoint, in the published format'
show checkpoint new --preset kimi-k3.1-demo --layers 4 "$checkpoint"

say '2. Compiled for the CPU with every pass'
show compile "$checkpoint" -o "$artifact"

say '3. A prompt through the compiled graphs (no torch in this process)'
show run "$artifact" --ids 11,22,33,44,55,66,77,88 --max-new-tokens 24 --prefill-chunk 4

say '4. Verified: the stored golden values, and eager PyTorch'
show verify "$artifact"

say 'Done.'
cat <<END
$checkpoint   a checkpoint as it is published: config.json, model.safetensors
$artifact     the model compiled: manifest.json, graphs/ (ONNX), weights, golden values

Try next ($hybridge is the command):
  $hybridge inspect $artifact --pass fuse_lightning_indexer
  $hybridge compile $checkpoint -o $folder/plain --passes none --dumps --overwrite
  $hybridge compile kimi-k3.1-pro -o $folder/pro --weights none --overwrite
  $hybridge --help
and README.md.
END
