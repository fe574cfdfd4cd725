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

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
show() {
  printf '$ hybridge %s\n' "$*"
  "$hybridge" "$@"
}

say '1. A small random K3.1 checkpoint, in the published format'
show checkpoint new --preset kimi-k3.1-demo "$checkpoint"

say '2. Compiled for the CPU with every pass'
show compile "$checkpoint" -o "$artifact"

say '3. A prompt through the compiled graphs (no torch in this process)'
show run "$artifact" --ids 11,22,33,44,55,66,77,88 --max-new-tokens 24 --prefill-chunk 4

say '4. Verified: the stored golden values, and eager PyTorch'
show verify "$artifact"

say 'Done.'
cat <<END
$checkpoint   config.json and model.safetensors
$artifact     manifest.json, graphs/ (ONNX, one a phase), golden/

Try next (the command is $hybridge):
  hybridge inspect $artifact --pass fuse_lightning_indexer
  hybridge compile $checkpoint -o $folder/plain --passes none       the traced graph, for comparison
  hybridge compile kimi-k3.1-pro -o $folder/pro --weights none      a full-size graph, no weights
  hybridge --help; docs/ in this folder
END
