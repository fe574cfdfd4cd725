"""Decode time against the length of the context, as a table and a plot.

    python benchmarks/contexts.py ARTIFACT [--plot docs/images/decode_by_context.svg]

Batch 1. What grows is the read of the indexer's keys: one row of them a token, in every DSA layer. The other kernels
of a DSA layer read a fixed number of rows, KDA a state of fixed size.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hybridge.commands.console import format_table
from plot import line_plot
from profiled import StepProfile, profile, profiling
from whole_model import Compiled

CONTEXTS = tuple(1024 << i for i in range(8))  # 1k to 128k
KERNELS = ("LightningIndexer", "SparseFlashAttention", "KdaDecode")
REPEATS = 15


def measure(artifact: Path) -> dict[int, StepProfile]:
    """One profile a context."""
    side = Compiled("ours", artifact)
    found = {}
    for context in CONTEXTS:
        with profiling():
            model, step = side.decode_on_model(1, context)
        found[context] = profile(model, "decode", step, REPEATS)
    return found


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--plot", type=Path, default=Path("docs/images/decode_by_context.svg"))
    options = parser.parse_args()
    found = measure(options.artifact)
    rows = [
        (context, f"{each.step:.2f}", *(f"{each.ops[name]:.3f}" for name in KERNELS))
        for context, each in found.items()
    ]
    print(format_table(("context", "step ms", *(f"{name} ms" for name in KERNELS)), rows))
    series = {"whole step": [(float(c), each.step) for c, each in found.items()]}
    for name in KERNELS:
        series[name] = [(float(context), each.ops[name]) for context, each in found.items()]
    title = "Decode, batch 1: a step and its kernels"
    line_plot(options.plot, title, "context, tokens", "milliseconds", series, True, True)
    print(f"plot in {options.plot}")


if __name__ == "__main__":
    main()
