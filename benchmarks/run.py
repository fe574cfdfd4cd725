"""Time a compiled model against PyTorch and onnxruntime, in one process: `make bench`.

    python benchmarks/run.py [--checkpoint FOLDER] [--only decode|prefill|experts] [--folder build/bench]

Prints a table and writes build/bench.json, a list of rows {name, ours_ms, baselines: {name: ms}, ratio_vs_given,
ratio_vs_best, floor_ms, floor_share}; "given" leaves out the baselines that are tuned beyond their defaults. Each group
of baselines takes turns with ours; a number is the median of its turns, a ratio is of numbers from the same turns. The
floor is from bytes and operations (`cost.py`) and the machine's limits, which are measured in the same turns. Models
are in bf16; the eager baselines are described in `baselines.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import safetensors.torch
import torch

from cost import cache_bytes, key_bytes, key_operations, prefill_operations, weight_bytes
from hybridge.artifacts.weights import read_weights
from hybridge.compiler import compile_model
from hybridge.models.config import ModelConfig, load_config
from hybridge.models.new_checkpoint import write_checkpoint
from hybridge.models.presets import MXFP4, preset
from machine import Probes, Row, Step, markdown, row, table, take_turns
from whole_model import Compiled, Eager, Inductor, Side, forget

ROOT = Path(__file__).resolve().parents[1]
PRESET = "kimi-k3.1-bench"
BASELINES = ("torch", "tuned", "aoti", "aoti_tuned", "fp32", "onnx")
BATCHES = (1, 8)
CONTEXTS = (1024, 16384, 65536)
PREFILL_TOKENS = 4096
DECODE_TURNS, PREFILL_TURNS = 7, 2


class Bench:
    """Everything that is measured on one checkpoint.

    Args:
        checkpoint: bf16 weights of the benchmark model's shape.
        folder: for artifacts and packages; kept between runs.
        baselines: names of groups, of BASELINES.
    """

    def __init__(self, checkpoint: Path, folder: Path, baselines: Sequence[str]) -> None:
        self.checkpoint, self.folder, self.baselines = checkpoint, folder, baselines
        self.config = load_config(checkpoint)
        self.probes = Probes()
        artifact = folder / "artifact"
        compile_model(checkpoint, artifact, activations="bfloat16", overwrite=True)
        self.ours = Compiled("ours", artifact)
        self._artifact = artifact

    def groups(self) -> Iterator[list[Side]]:
        """Baselines that fit in memory together, those that were asked for."""
        bf16, fp32, checkpoint = torch.bfloat16, torch.float32, self.checkpoint
        package = self.folder / "aoti.pt2"
        makers: dict[str, Callable[[], list[Side]]] = {
            "torch": lambda: [Eager(checkpoint, bf16), Inductor(checkpoint, bf16)],
            "tuned": lambda: [Inductor(checkpoint, bf16, tuned=True)],
            "aoti": lambda: [Inductor(checkpoint, bf16, package=package)],
            "aoti_tuned": lambda: [Inductor(checkpoint, bf16, package=package, tuned=True)],
            "fp32": lambda: [Eager(checkpoint, fp32)],
            "onnx": lambda: [self._plain_onnx()],
        }
        for name in self.baselines:
            yield makers[name]()

    def decode(self) -> list[Row]:
        """Every batch and context, with weights as they are shipped and packed (`--weights packed`)."""
        cases = [(rows, context) for rows in BATCHES for context in CONTEXTS]
        found = {case: _Measured() for case in cases}
        artifact = self.folder / "packed"
        compile_model(
            self.checkpoint, artifact, activations="bfloat16", weights="packed", overwrite=True
        )
        packed = Compiled("packed", artifact)
        share = _stored_bytes(artifact) / _stored_bytes(self._artifact)
        for sides in self.groups():
            for rows, context in cases:
                steps = {side.name: side.decode(rows, context) for side in sides}
                steps |= {"ours": self.ours.decode(rows, context)}
                steps |= {"packed": packed.decode(rows, context), **self._limits()}
                found[rows, context].add(_turns(steps, DECODE_TURNS))
                steps.clear()
                print(f"  decode {rows} x {context}: {found[rows, context].last}", flush=True)
            sides.clear()
            forget()
        made = []
        for (rows, context), each in found.items():
            name = f"decode, batch {rows}, context {context}"
            made.append(each.row(name, self._decode_floor(each, rows, context)))
            floor = self._decode_floor(each, rows, context, share=share)
            made.append(each.row(f"{name}, packed weights", floor, "packed"))
        return made

    def prefill(self) -> list[Row]:
        """One prompt."""
        found = _Measured()
        for sides in self.groups():
            steps = {side.name: side.prefill(PREFILL_TOKENS) for side in sides}
            steps |= {"ours": self.ours.prefill(PREFILL_TOKENS)}
            steps |= {"multiply": self.probes.multiply(torch.bfloat16)}
            found.add(_turns(steps, PREFILL_TURNS, warm=0))
            print(f"  prefill: {found.last}", flush=True)
            steps.clear()
            sides.clear()
            forget()
        operations = prefill_operations(self.config, PREFILL_TOKENS)
        floor = operations * found.first["multiply"] / self.probes.operations
        return [found.row(f"prefill of {PREFILL_TOKENS} tokens", floor)]

    def experts(self) -> list[Row]:
        """The same model with its routed experts in MXFP4, beside the bf16 one."""
        folder = self.folder / "mxfp4"
        checkpoint = folder / "checkpoint"
        config = dataclasses.replace(self.config, quantization=MXFP4)
        if not checkpoint.exists():
            write_checkpoint(config, checkpoint)
        compile_model(checkpoint, folder / "artifact", activations="bfloat16", overwrite=True)
        packed = Compiled("mxfp4", folder / "artifact")
        rows = []
        for batch in BATCHES:
            steps = {"bf16 experts": self.ours.decode(batch, 1024), **self._limits()}
            found = _Measured()
            found.add(_turns({"ours": packed.decode(batch, 1024), **steps}, DECODE_TURNS))
            floor = self._decode_floor(found, batch, 1024, config)
            rows.append(found.row(f"MXFP4 experts, decode, batch {batch}, context 1024", floor))
        return rows

    def _limits(self) -> dict[str, Step]:
        return {"read": self.probes.read, "multiply": self.probes.multiply(torch.bfloat16)}

    def _decode_floor(
        self,
        found: _Measured,
        rows: int,
        context: int,
        config: ModelConfig | None = None,
        share: float = 1.0,
    ) -> float:
        """Weights (`share` of their bytes), caches and keys once from memory; keys take as long as their products."""
        model = config or self.config
        byte = found.first["read"] / self.probes.bytes_read
        operation = found.first["multiply"] / self.probes.operations
        read = weight_bytes(model, rows) * share + cache_bytes(model, rows, context)
        keys = max(
            key_bytes(model, rows, context) * byte, key_operations(model, rows, context) * operation
        )
        return read * byte + keys

    def _plain_onnx(self) -> Compiled:
        """The graph as traced, standard operators only, fp32 weights: onnxruntime has no bf16 products here."""
        wide = self.folder / "fp32"
        if not (wide / "checkpoint").exists():
            _widen(self.checkpoint, wide / "checkpoint")
        artifact = wide / "artifact"
        compile_model(wide / "checkpoint", artifact, passes=(), overwrite=True)
        return Compiled("plain ONNX fp32", artifact, native=False)


class _Measured:
    """Times of one case, a group of baselines at a time."""

    def __init__(self) -> None:
        self._groups: list[dict[str, float]] = []

    def add(self, times: dict[str, float]) -> None:
        self._groups.append(times)

    @property
    def first(self) -> dict[str, float]:
        return self._groups[0]

    @property
    def last(self) -> str:
        return ", ".join(f"{name} {ms:.1f}" for name, ms in self._groups[-1].items())

    def row(self, name: str, floor_ms: float, side: str = "ours") -> Row:
        """A side as in the first group; every baseline as if that side had taken as long in its group."""
        ours = self.first[side]
        baselines = {
            each: ms * ours / times[side]
            for times in self._groups
            for each, ms in times.items()
            if each not in ("ours", "packed", "read", "multiply")
        }
        return row(name, ours, baselines, floor_ms)


def _turns(steps: dict[str, Step], turns: int, warm: int = 1) -> dict[str, float]:
    return take_turns(steps, turns, warm)


def _stored_bytes(artifact: Path) -> int:
    """Bytes of all weights that an artifact's graphs read."""
    return sum(entry.length for entry in read_weights(artifact / "weights.json").values())


def _widen(source: Path, target: Path) -> None:
    """A copy of a checkpoint in fp32."""
    target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            tensors = safetensors.torch.load_file(path)
            safetensors.torch.save_file(
                {k: v.float() for k, v in tensors.items()}, target / path.name
            )
        elif path.name == "config.json":
            text = path.read_text(encoding="utf-8").replace('"bfloat16"', '"float32"')
            (target / path.name).write_text(text, encoding="utf-8")
        else:
            (target / path.name).write_bytes(path.read_bytes())


def measure(
    checkpoint: Path, folder: Path, only: Sequence[str], baselines: Sequence[str]
) -> list[Row]:
    """The rows of the chosen parts."""
    # Inductor freezes weights only where no gradient is asked for.
    torch.set_grad_enabled(False)
    bench = Bench(checkpoint, folder, baselines)
    parts = {"decode": bench.decode, "prefill": bench.prefill, "experts": bench.experts}
    return [each for name in only for each in parts[name]()]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="the benchmark model; made if left out")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--only", nargs="+", default=["decode", "prefill", "experts"])
    parser.add_argument("--baselines", nargs="+", choices=BASELINES, default=BASELINES)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench.json")
    options = parser.parse_args()
    checkpoint = options.checkpoint or options.folder / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(preset(PRESET), checkpoint, progress=print)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = measure(checkpoint, options.folder, options.only, options.baselines)
    print(table(PRESET, rows))
    print(markdown(PRESET, rows))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"rows in {options.out}")


if __name__ == "__main__":
    main()
