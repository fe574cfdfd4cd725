"""Drawn calls of every operator under AddressSanitizer and UBSan: `make fuzz`, by way of fuzz.sh.

Batches of calls (fuzz_calls.py) are written as a recording, each at every instruction-set level of this machine, and
replay.cpp runs them on one thread and on four, while the next batch is drawn. Checked are memory, refusals, that
nothing but outputs is written, and that threads do not matter; not the numbers (test_shapes.py does, `make soak`).
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import harness, recording
from .fuzz_calls import DRAWS, Drawn, call
from .test_shapes import at_level

BATCH = 8 * len(DRAWS)
HANGS = 600  # seconds that no batch takes
MOST_FINDINGS = 10


@dataclass(frozen=True)
class Entry:
    """One call at one level."""

    number: int
    level: str
    drawn: Drawn
    data: bytes


@dataclass
class Replay:
    """The instrumented program, and a file for its recordings."""

    program: Path
    library: Path
    file: Path
    process: subprocess.Popen[str] | None = None

    def start(self, entries: Iterable[Entry]) -> None:
        self.file.write_bytes(b"".join(entry.data for entry in entries))
        command = [str(self.program), str(self.library), str(self.file)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def wait(self) -> str:
        """What went wrong; empty if nothing did."""
        assert self.process is not None
        try:
            report = self.process.communicate(timeout=HANGS)[1]
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # which says where it hangs
            report = f"no end after {HANGS} s\n" + self.process.communicate()[1]
        return (report or "it died in silence") if self.process.returncode else ""

    def run(self, entries: Iterable[Entry]) -> str:
        self.start(entries)
        return self.wait()


def entries_of(seed: int, numbers: Iterable[int], levels: Iterable[str]) -> list[Entry]:
    return [
        entry
        for number in numbers
        for drawn in [call(seed, number)]
        for level in levels
        if (entry := entry_of(number, drawn, level)).data
    ]


def entry_of(number: int, drawn: Drawn, level: str) -> Entry:
    case = drawn.case
    outputs = {name: np.dtype(dtype) for name, dtype in case.outputs.items()}
    with at_level(level):
        data = recording.entry(
            case.op, case.attributes, case.inputs, outputs, case.alias, harness.ELEMENT
        )
    return Entry(number, level, drawn, data and data + struct.pack("<q", drawn.outcome))


def place_of(report: str) -> str:
    """What two reports of one fault share: the line of a kernel, or the operator and what replay.cpp says of it."""
    line = re.search(r"kernels/(?:math|ops|framework)/[\w.]+:\d+", report)
    said = re.search(r"replay: in call \d+: (\w+).*\nreplay: ([^:\n]*)", report)
    return line[0] if line else f"{said[1]}: {said[2]}" if said else report


def readable(report: str) -> str:
    """Without the map of memory around."""
    return re.sub(r"^SUMMARY: .*?^==\d+==ABORTING\n", "", report, flags=re.S | re.M).strip()


@dataclass
class Fuzzer:
    """Counts the calls that were made and reports what went wrong."""

    replay: Replay
    seed: int
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)

    def settle(self, entries: list[Entry]) -> None:
        """Waits for the replay of these, and goes on behind each call that it stopped at."""
        while report := self.replay.wait():
            stopped = re.search(r"replay: in call (\d+):", report)
            if stopped is None:
                self.found(entries, None, report)
                return
            at = int(stopped[1])
            self.count(entries[: at + 1])
            self.found(entries[: at + 1], entries[at], report)
            if len(self.findings) >= MOST_FINDINGS:
                return
            entries = entries[at + 1 :]
            self.replay.start(entries)
        self.count(entries)

    def count(self, entries: list[Entry]) -> None:
        self.calls.update((entry.drawn.case.op, entry.drawn.outcome.name) for entry in entries)

    def found(self, batch: list[Entry], entry: Entry | None, report: str) -> None:
        place = place_of(report)
        self.findings[place] += 1
        if self.findings[place] > 1:
            return
        print(f"\nFINDING {len(self.findings)}\n{readable(report)}")
        if entry is not None:
            print(f"level {entry.level}: {entry.drawn.describe()}")
            if self.replay.run([entry]):
                print(f"reproduce with: make fuzz CALL={self.seed}:{entry.number}", flush=True)
                return
        # It takes what earlier calls left behind.
        kept = self.replay.file.with_name(f"finding-{self.seed}-{len(self.findings)}")
        kept.write_bytes(b"".join(one.data for one in batch))
        print(f"reproduce with: {self.replay.program} {self.replay.library} {kept}", flush=True)

    def table(self) -> str:
        lines = [f"{'calls':>8} {'return':>8} {'refused':>8} {'either':>8}"]
        for op in sorted(DRAWS):
            numbers = [self.calls[op, name] for name in ("RETURNS", "REFUSED", "EITHER")]
            lines.append("".join(f"{n:>8} " for n in (sum(numbers), *numbers)) + f" {op}")
        total = self.calls.total()
        return "\n".join([*lines, f"{total:>8}  calls, {len(self.findings)} findings"])


def fuzz(fuzzer: Fuzzer, minutes: float) -> None:
    levels = harness.machine_levels()
    print(f"seed {fuzzer.seed}, {minutes:g} minutes, levels {' '.join(levels)}", flush=True)
    end = time.monotonic() + 60 * minutes
    running: list[Entry] = []
    for first in range(0, sys.maxsize, BATCH):
        if time.monotonic() > end or len(fuzzer.findings) >= MOST_FINDINGS:
            break
        drawn = entries_of(fuzzer.seed, range(first, first + BATCH), levels)
        if running:
            fuzzer.settle(running)
        fuzzer.replay.start(drawn)
        running = drawn
    fuzzer.settle(running)
    print(fuzzer.table())


def again(fuzzer: Fuzzer, number: int) -> None:
    entries = entries_of(fuzzer.seed, [number], harness.machine_levels())
    print(entries[0].drawn.describe(), flush=True)
    for entry in entries:
        report = fuzzer.replay.run([entry])
        fuzzer.findings[report] += bool(report)
        print(f"level {entry.level}: {readable(report) or 'ok'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="folder of the instrumented library and replay")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, help="draw these calls again (default: new ones)")
    parser.add_argument("--call", help="SEED:NUMBER, one call alone")
    options = parser.parse_args()
    folder = Path("build/fuzz")
    folder.mkdir(parents=True, exist_ok=True)
    library = options.build / "libhybridge_kernels.so"
    replay = Replay(options.build / "replay", library, folder / f"calls-{os.getpid()}")
    try:
        if options.call:
            seed, number = map(int, options.call.split(":"))
            fuzzer = Fuzzer(replay, seed)
            again(fuzzer, number)
        else:
            seed = secrets.randbelow(2**32) if options.seed is None else options.seed
            fuzzer = Fuzzer(replay, seed)
            fuzz(fuzzer, options.minutes)
    finally:
        replay.file.unlink(missing_ok=True)
    return int(fuzzer.findings.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
