"""Time a compiled model against the eager one, in one process run: `make bench`.

Prints a table and writes build/bench.json, a list of rows {name, ours_ms, baselines: {name: ms},
ratio_vs_best}. Each number is the median of several runs; trust the ratios, machines differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hybridge.commands.console import format_table
from hybridge.compiler import compile_model
from hybridge.compiler.reference import eager_model
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import load_config
from hybridge.models.new_checkpoint import write_checkpoint
from hybridge.models.presets import preset
from hybridge.models.session import EagerSession
from hybridge.runner import Engine, load

ROOT = Path(__file__).resolve().parents[1]
PREFILL_TOKENS = 256
CONTEXTS = (64, 1024)
REPEATS = 15

Row = dict[str, object]


def median_ms(step: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of a call in milliseconds, after two to warm up."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[2:])


def row(name: str, ours: float, baselines: dict[str, float]) -> Row:
    """One comparison; a ratio above 1 says how many times faster than the best baseline."""
    return {
        "name": name,
        "ours_ms": ours,
        "baselines": baselines,
        "ratio_vs_best": min(baselines.values()) / ours,
    }


def time_prefill(engine: Engine, eager: EagerSession, tokens: list[int]) -> Row:
    """A prompt in one call, logits of its last token."""
    ids = torch.tensor(tokens, dtype=torch.int32)

    def ours() -> None:
        next(engine.generate(tokens, max_new_tokens=1))

    eager.lengths = [0]
    batch = eager.batch([ids])
    batch["logits_index"] = torch.tensor([len(tokens) - 1], dtype=torch.int32)

    def baseline() -> None:
        eager.model("prefill", **batch, caches=eager.caches)

    return row(f"prefill {len(tokens)}", median_ms(ours), {"eager": median_ms(baseline)})


def time_decode(engine: Engine, eager: EagerSession, tokens: list[int]) -> Row:
    """One token after a context of these tokens."""
    sequence = engine.add(tokens, max_new_tokens=REPEATS + 4, stop_ids=())
    while not engine.tokens(sequence):
        engine.step()
    ours = median_ms(engine.step)
    engine.free(sequence)

    eager.lengths = [0]
    eager.step([torch.tensor(tokens, dtype=torch.int32)])
    one = torch.tensor([1], dtype=torch.int32)
    baseline = median_ms(lambda: eager.step([one], "decode"))
    return row(f"decode at {len(tokens)}", ours, {"eager": baseline})


def prepare(name: str, folder: Path, activations: str) -> tuple[Path, Path]:
    """The checkpoint and artifact of a preset, made if they are not there."""
    checkpoint, artifact = folder / name / "checkpoint", folder / name / "artifact"
    if not checkpoint.exists():
        write_checkpoint(preset(name), checkpoint, progress=print)
    compile_model(checkpoint, artifact, activations=activations, overwrite=True, progress=print)
    return checkpoint, artifact


def measure(name: str, folder: Path, activations: str) -> list[Row]:
    """All rows for one preset."""
    checkpoint, artifact = prepare(name, folder, activations)
    model = eager_model(Checkpoint.open(checkpoint), load_config(checkpoint))
    longest = max(*CONTEXTS, PREFILL_TOKENS) + REPEATS + 4
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, model.config.vocab_size, longest).tolist()
    with load(artifact, slots=1, max_context=longest) as engine, torch.no_grad():
        engine.prefill_chunk = longest
        eager = EagerSession(model, max_context=longest, block_size=64)
        rows = [time_prefill(engine, eager, tokens[:PREFILL_TOKENS])]
        rows += [time_decode(engine, eager, tokens[:context]) for context in CONTEXTS]
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="kimi-k3.1-demo")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--activations", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    rows = measure(options.preset, options.folder, options.activations)
    cells = [
        (
            r["name"],
            f"{r['ours_ms']:.2f}",
            f"{r['baselines']['eager']:.2f}",
            f"{r['ratio_vs_best']:.1f}",
        )  # type: ignore[index]
        for r in rows
    ]
    print(format_table((options.preset, "hybridge ms", "eager ms", "times faster"), cells))
    target = ROOT / "build" / "bench.json"
    target.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print(f"rows in {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
