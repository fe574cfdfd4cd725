"""What each pass is worth: the model compiled with all passes, in turns with the model compiled without one.

    env -u OMP_NUM_THREADS python benchmarks/ablation.py --checkpoint FOLDER [--activations bfloat16]

Prints a markdown table and writes build/ablation.json. The two take turns in one process (see `machine.take_turns`),
on a prompt and on a decode step, so that a slow minute falls on both. A pass that works on what another one makes goes
with it: then the row says so.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hybridge.compiler import compile_model
from hybridge.compiler.pipeline import PIPELINE, pass_names
from hybridge.models.new_checkpoint import write_checkpoint
from hybridge.models.presets import preset
from machine import take_turns
from whole_model import Compiled, forget

ROOT = Path(__file__).resolve().parents[1]
ALL = "(none)"
# Differences below this are what two runs of one variant differ by.
NOISE = 0.03


@dataclass
class Variant:
    """One set of passes; what a phase takes with it, and with all passes in turns with it, in milliseconds."""

    left_out: str
    passes: tuple[str, ...]
    artifact: Path
    nodes: dict[str, int] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    all_ms: dict[str, float] = field(default_factory=dict)

    def ratio(self, phase: str) -> float:
        """How much longer it takes than with all passes."""
        return self.ms[phase] / self.all_ms[phase]


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
        golden=False,
    )
    for phase, records in manifest.passes.items():
        variant.nodes[phase] = records[-1].nodes_after if records else 0


def measure(variant: Variant, everything: Variant, sizes: Mapping[str, int], turns: int) -> None:
    """Fill in the times of a variant: a prompt of `sizes["prefill"]`, a decode step at `sizes["decode"]`."""
    for phase, tokens in sizes.items():
        sides = [Compiled(each.left_out, each.artifact) for each in (everything, variant)]
        steps = {
            side.name: side.decode(1, tokens) if phase == "decode" else side.prefill(tokens)
            for side in sides
        }
        times = take_turns(steps, turns)
        variant.all_ms[phase], variant.ms[phase] = times[ALL], times[variant.left_out]
        steps.clear()
        forget()


def rows(every: Sequence[Variant]) -> list[dict[str, object]]:
    """A row a variant that leaves something out."""
    return [
        {
            **{key: value for key, value in asdict(each).items() if key != "artifact"},
            "ratio": {phase: each.ratio(phase) for phase in each.ms},
            "pays_on": [phase for phase in each.ms if each.ratio(phase) > 1 + NOISE],
        }
        for each in every
    ]


def table(every: Sequence[Variant], sizes: Mapping[str, int]) -> str:
    lines = [
        f"| left out | prefill {sizes['prefill']}, ms | times all | decode at {sizes['decode']}, ms | times all "
        "| nodes | pays on |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in every:
        pays = [phase for phase in each.ms if each.ratio(phase) > 1 + NOISE]
        nodes = " / ".join(str(count) for count in each.nodes.values())
        lines.append(
            f"| {each.left_out} | {each.ms['prefill']:.1f} | {each.ratio('prefill'):.2f} "
            f"| {each.ms['decode']:.2f} | {each.ratio('decode'):.2f} | {nodes} "
            f"| {', '.join(pays) or 'neither'} |"
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
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=pass_names(), help="passes to leave out")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "ablation.json")
    options = parser.parse_args()
    sizes = {"prefill": options.prompt, "decode": options.context}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = options.checkpoint or Path(scratch) / "checkpoint"
        if options.checkpoint is None:
            write_checkpoint(preset(options.preset), checkpoint, progress=print)
        everything, *others = variants(Path(scratch), options.only)
        for variant in (everything, *others):
            print(f"compile without {variant.left_out}", flush=True)
            compile_variant(checkpoint, variant, options.activations)
        for variant in others:
            measure(variant, everything, sizes, options.turns)
            print(f"measured without {variant.left_out}", flush=True)
    print(table(others, sizes))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows(others), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
