"""How compile time and memory grow with the layers of a model: no weights, both phases, one process a size.

    python benchmarks/pipeline_scaling.py [--preset kimi-k3.1-pro] [--layers 12 24 48 93]

Prints a markdown table, writes build/pipeline_scaling.json and docs/images/pipeline_scaling.svg. Times are those of the
processor, of the one thread that traces and rewrites; memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plot import line_plot

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "pipeline_scaling.svg"

Row = Mapping[str, Any]


def measure(name: str, layers: int) -> Row:
    """Trace both phases and run the passes, in this process."""
    from hybridge.compiler.pipeline import run_pipeline
    from hybridge.compiler.trace import trace
    from hybridge.models.batch import PHASES
    from hybridge.models.presets import preset, scale

    config, proofs = scale(preset(name), layers=layers), {}
    row: dict[str, Any] = {"layers": layers, "trace_s": 0.0, "passes_s": 0.0, "nodes": 0}
    row["by_pass_s"] = {}
    gc.disable()  # as compile_model does
    for phase in PHASES:
        start = time.process_time()
        traced = trace(config, phase, block_size=64)
        row["trace_s"] += time.process_time() - start
        start = time.process_time()
        report = run_pipeline(
            traced.graph_module, phase, config, weights=traced.weights, proofs=proofs
        )
        row["passes_s"] += time.process_time() - start
        row["nodes"] += report.results[0].nodes_before
        for result in report.results:
            row["by_pass_s"][result.name] = row["by_pass_s"].get(result.name, 0.0) + result.seconds
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def measure_apart(name: str, layers: int) -> Row:
    """The same in a process of its own, whose peak memory is that of this size."""
    command = [sys.executable, __file__, "--preset", name, "--one", str(layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{layers} layers failed:\n{done.stderr}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| layers | nodes | torch.export, s | passes, s | passes / export | passes, ms a layer | peak memory, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share, each = row["passes_s"] / row["trace_s"], 1000 * row["passes_s"] / row["layers"]
        lines.append(
            f"| {row['layers']} | {row['nodes']} | {row['trace_s']:.1f} | {row['passes_s']:.1f} | {share:.2f} "
            f"| {each:.0f} | {row['peak_mib']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="kimi-k3.1-pro")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 93])
    parser.add_argument("--image", type=Path, default=IMAGE)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "pipeline_scaling.json")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.preset, options.one)))
        return
    rows = []
    for layers in options.layers:
        rows.append(measure_apart(options.preset, layers))
        print(f"{layers} layers: {rows[-1]['passes_s']:.1f} s of passes", flush=True)
    print(table(rows))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    named = (("torch.export", "trace_s"), ("all passes", "passes_s"))
    series = {name: [(row["layers"], row[key]) for row in rows] for name, key in named}
    title = f"Compiling {options.preset}, both phases, no weights"
    line_plot(options.image, title, "layers", "processor seconds", series)


if __name__ == "__main__":
    main()
