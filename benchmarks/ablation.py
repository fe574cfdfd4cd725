"""What each pass is worth: the model compiled with all passes, then with each one left out.

    env -u OMP_NUM_THREADS python benchmarks/ablation.py --checkpoint FOLDER [--activations bfloat16]

Prints a markdown table and writes build/ablation.json. Every round loads the variants one after the other and measures
a prompt and single decode steps; a figure is the median over the rounds, so that a slow minute does not fall on
one variant. A pass that works on what another one makes goes with it: then the row says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from hybridge.compiler import compile as compiling
from hybridge.compiler import compile_model
from hybridge.compiler.pipeline import PIPELINE, pass_names
from hybridge.models.new_checkpoint import write_checkpoint
from hybridge.models.presets import preset
from hybridge.runner import load

ROOT = Path(__file__).resolve().parents[1]
ALL = "(none)"
# Differences below this are what two runs of one variant differ by.
NOISE = 0.03


@dataclass
class Variant:
    """One set of passes and its times in milliseconds, one a round (prefill) or a step (decode)."""

    left_out: str
    passes: tuple[str, ...]
    artifact: Path
    nodes: dict[str, int] = field(default_factory=dict)
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)


def dependents(name: str) -> tuple[str, ...]:
    """Passes that find nothing without this one, directly or through another."""
    found = {name}
    for step in PIPELINE:  # in order: a pass needs earlier ones
        if found & set(step.needs):
            found.add(step.name)
    return tuple(each for each in pass_names() if each in found and each != name)


def variants(folder: Path, only: Sequence[str] | None) -> list[Variant]:
    """All passes first, then each of `only` (or every one) left out."""
    result = [Variant(ALL, pass_names(), folder / "all")]
    for name in only or pass_names():
        gone = {name, *dependents(name)}
        kept = tuple(each for each in pass_names() if each not in gone)
        label = ", ".join(each for each in pass_names() if each in gone)
        result.append(Variant(label, kept, folder / f"without_{name}"))
    return result


def compile_variant(checkpoint: Path, variant: Variant, activations: str) -> None:
    manifest = compile_model(
        checkpoint,
        variant.artifact,
        passes=variant.passes,
        weights="reference",
        activations=activations,
        overwrite=True,
    )
    for phase, records in manifest.passes.items():
        variant.nodes[phase] = records[-1].nodes_after if records else 0


def measure(variant: Variant, tokens: Sequence[int], prompt: int, context: int, steps: int) -> None:
    """One round: a prompt, then decode steps after a context."""
    with load(variant.artifact, slots=1, max_context=len(tokens)) as engine:
        engine.prefill_chunk = len(tokens)
        for warm in (True, False):
            start = time.perf_counter()
            next(engine.generate(list(tokens[:prompt]), max_new_tokens=1))
            if not warm:
                variant.prefill_ms.append((time.perf_counter() - start) * 1000)
        sequence = engine.add(list(tokens[:context]), max_new_tokens=steps + 3, stop_ids=())
        while not engine.tokens(sequence):
            engine.step()
        engine.step()
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            variant.decode_ms.append((time.perf_counter() - start) * 1000)
        engine.free(sequence)


def rows(every: Sequence[Variant]) -> list[dict[str, object]]:
    """A row a variant: medians, and how much longer it takes than with all passes."""
    base = [statistics.median(times) for times in (every[0].prefill_ms, every[0].decode_ms)]
    result: list[dict[str, object]] = []
    for variant in every:
        times = [statistics.median(each) for each in (variant.prefill_ms, variant.decode_ms)]
        ratios = [now / then for now, then in zip(times, base, strict=True)]
        named = zip(("prefill", "decode"), ratios, strict=True)
        pays = [phase for phase, ratio in named if ratio > 1 + NOISE]
        result.append(
            {
                **{key: value for key, value in asdict(variant).items() if key != "artifact"},
                "prefill_median_ms": times[0],
                "decode_median_ms": times[1],
                "prefill_ratio": ratios[0],
                "decode_ratio": ratios[1],
                "pays_on": pays,
            }
        )
    return result


def table(found: Sequence[dict[str, object]], prompt: int, context: int) -> str:
    lines = [
        f"| left out | prefill {prompt}, ms | times all | decode at {context}, ms | times all | nodes | pays on |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        pays = ", ".join(row["pays_on"]) or "neither"  # type: ignore[arg-type]
        nodes = " / ".join(str(count) for count in row["nodes"].values())  # type: ignore[attr-defined]
        lines.append(
            f"| {row['left_out']} | {row['prefill_median_ms']:.1f} | {row['prefill_ratio']:.2f} "
            f"| {row['decode_median_ms']:.2f} | {row['decode_ratio']:.2f} | {nodes} "
            f"| {'' if row['left_out'] == ALL else pays} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="its weights are used where they are")
    parser.add_argument(
        "--preset", default="kimi-k3.1-bench", help="made anew without --checkpoint"
    )
    parser.add_argument("--activations", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="decode steps a round")
    parser.add_argument("--only", nargs="*", choices=pass_names(), help="passes to leave out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ablation.json")
    options = parser.parse_args()
    # Golden values would run the eager model once a variant; nothing here reads them.
    compiling.fits_in_memory = lambda _: False  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = options.checkpoint or Path(scratch) / "checkpoint"
        if options.checkpoint is None:
            write_checkpoint(preset(options.preset), checkpoint, progress=print)
        every = variants(Path(scratch), options.only)
        for variant in every:
            print(f"compile without {variant.left_out}", flush=True)
            compile_variant(checkpoint, variant, options.activations)
        longest = max(options.prompt, options.context) + options.steps + 8
        tokens = np.random.default_rng(0).integers(0, 200, longest).tolist()
        for number in range(options.rounds):
            for variant in every:
                measure(variant, tokens, options.prompt, options.context, options.steps)
            print(f"round {number + 1} of {options.rounds}", flush=True)
        found = rows(every)
    print(table(found, options.prompt, options.context))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
