"""The runner's own cost: start-up, memory, and the share of a decode step outside of kernels.

    python benchmarks/runner.py ARTIFACT

Start-up is measured in a fresh process, with the artifact's files in the page cache. Weights are mapped: they count as
file memory, shared between processes, and the rest is what a process needs for itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from hybridge.commands.console import format_table
from profiled import profile, profiling
from whole_model import Compiled

CONTEXT = 1024
REPEATS = 30

_START = """
import json, sys, time
begin = time.perf_counter()
from hybridge.runner import load
imported = time.perf_counter()
engine = load(sys.argv[1], slots=1, max_context=2048, threads=2)
loaded = time.perf_counter()
next(engine.generate([1, 2, 3, 4], max_new_tokens=1))
first = time.perf_counter()
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kib = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssAnon", "RssFile")}
print(json.dumps({
    "import ms": (imported - begin) * 1000, "load ms": (loaded - imported) * 1000,
    "first token of four ms": (first - loaded) * 1000,
    "resident MiB": kib["VmRSS"] / 1024, "of it own MiB": kib["RssAnon"] / 1024,
    "of it mapped MiB": kib["RssFile"] / 1024, "torch imported": "torch" in sys.modules,
}))
"""


def start_up(artifact: Path) -> dict[str, object]:
    """Figures of a fresh process that loads and makes one token; the second of two runs."""
    command = [sys.executable, "-P", "-c", _START, str(artifact)]
    for _ in range(2):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, object] = json.loads(output)
    return found


def overhead(artifact: Path) -> dict[str, object]:
    """A decode step at batch 1, and what of it is outside of kernels."""
    with profiling():
        model, step = Compiled("ours", artifact).decode_on_model(1, CONTEXT)
    found = profile(model, "decode", step, REPEATS)
    return {
        "decode step ms": found.step,
        "outside of kernels ms": found.outside,
        "outside of kernels, share": f"{max(0.0, found.outside) / found.step:.1%}",
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    artifact = parser.parse_args().artifact
    figures = {**start_up(artifact), **overhead(artifact)}
    cells = [(k, f"{v:.1f}" if isinstance(v, float) else str(v)) for k, v in figures.items()]
    print(format_table(("runner", "measured"), cells))


if __name__ == "__main__":
    main()
