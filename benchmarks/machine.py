"""What every benchmark shares: timing in turns, the machine's limits measured beside, rows and their table.

Machines are shared and swing by a factor of two within minutes. So what is compared is timed in turns, a number is
the median of its turns, and the memory's and the processor's rates are measured in the same turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridge.commands.console import format_table

Row = dict[str, object]
TUNED = "tuned"  # ends the name of a baseline that is not in its default settings
Step = Callable[[], object]

# Larger than any cache, small enough to be read in a few milliseconds.
_PROBE_BYTES = 256 << 20
_PROBE_SIDE = 2048


# How long a step is run before it is timed, and then timed, within its turn: the caches are not its own
# at first, and the cores are taken by the threads of the library before it, which spin for some
# milliseconds (a product of 1.8 ms took 6 in the first call). A long step does not notice.
_SETTLE_MS, _TIMED_MS, _LONG_MS = 20.0, 20.0, 500.0


def take_turns(steps: Mapping[str, Step], turns: int, warm: int = 2) -> dict[str, float]:
    """The median time of each step in milliseconds, the steps taking turns."""
    for step in steps.values():
        for _ in range(warm):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            times[name].append(_turn(step))
    return {name: statistics.median(found) for name, found in times.items()}


def _turn(step: Step) -> float:
    """Milliseconds of a call: of the only one if it is long, or the mean of those after settling."""
    first, _ = _calls(step, 0.0)
    if first >= _LONG_MS:
        return first
    if first < _SETTLE_MS:
        _calls(step, _SETTLE_MS - first)
    total, count = _calls(step, _TIMED_MS)
    return total / count


def _calls(step: Step, least_ms: float) -> tuple[float, int]:
    """Call once, and again until so many milliseconds have passed: how many, and how many calls."""
    start, count, passed = time.perf_counter(), 0, 0.0
    while count == 0 or passed < least_ms:
        step()
        count += 1
        passed = (time.perf_counter() - start) * 1000
    return passed, count


@dataclass(frozen=True)
class Limits:
    """What the machine does in a millisecond: bytes read from memory, operations of matrix products."""

    bytes_per_ms: float
    bf16_per_ms: float
    fp32_per_ms: float

    def floor_ms(self, read: float, operations: float = 0.0, *, fp32: bool = False) -> float:
        """The least time for so many bytes and so many operations, whichever is more."""
        peak = self.fp32_per_ms if fp32 else self.bf16_per_ms
        return max(read / self.bytes_per_ms, operations / peak)


class Probes:
    """Steps that measure the machine, to take turns with what is measured on it."""

    bytes_read = float(_PROBE_BYTES)
    operations = 2.0 * _PROBE_SIDE**3

    def __init__(self) -> None:
        self._halves = torch.ones(2, _PROBE_BYTES // 8)
        square = torch.randn(_PROBE_SIDE, _PROBE_SIDE)
        self._squares = {torch.float32: square, torch.bfloat16: square.to(torch.bfloat16)}

    def read(self) -> object:
        """Read the probe's bytes once: of torch's reductions the one that reads fastest."""
        return torch.dot(*self._halves)

    def multiply(self, dtype: torch.dtype) -> Step:
        """One square product, which torch does with oneDNN near the peak."""
        square = self._squares[dtype]
        return lambda: square @ square

    def limits(self, turns: int = 7) -> Limits:
        """Measure now."""
        steps = {"read": self.read, **{str(d): self.multiply(d) for d in self._squares}}
        found = take_turns(steps, turns)
        return Limits(
            bytes_per_ms=_PROBE_BYTES / found["read"],
            bf16_per_ms=self.operations / found[str(torch.bfloat16)],
            fp32_per_ms=self.operations / found[str(torch.float32)],
        )


def compare(
    name: str, ours: Step, baselines: Mapping[str, Step], floor_ms: float, turns: int
) -> Row:
    """One row: ours and the baselines in turns. A ratio above 1 is how many times faster than the best."""
    with torch.no_grad():
        times = take_turns({"": ours, **baselines}, turns)
    return row(name, times.pop(""), times, floor_ms)


def row(name: str, ours_ms: float, baselines: Mapping[str, float], floor_ms: float) -> Row:
    """A row of times that were taken already."""
    given = [ms for each, ms in baselines.items() if not each.endswith(TUNED)]
    return {
        "name": name,
        "ours_ms": ours_ms,
        "baselines": dict(baselines),
        "ratio_vs_given": min(given) / ours_ms if given else None,
        "ratio_vs_best": min(baselines.values()) / ours_ms if baselines else None,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / ours_ms,
    }


def table(title: str, rows: Sequence[Row]) -> str:
    """The rows as text, one column a baseline."""
    head, *lines = _grid(title, rows)
    return format_table(head, lines)


def markdown(title: str, rows: Sequence[Row]) -> str:
    """The same for a page of the documentation."""
    head, *lines = _grid(title, rows)
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *lines)
    )


def _grid(title: str, rows: Sequence[Row]) -> list[tuple[str, ...]]:
    names = list(dict.fromkeys(name for each in rows for name in _baselines(each)))
    tuned = any(name.endswith(TUNED) for name in names)
    ratios = {"× given": "ratio_vs_given"} if tuned else {}
    ratios["× best"] = "ratio_vs_best"
    head = (title, "ours ms", *(f"{name} ms" for name in names), *ratios, "floor ms", "share")
    return [head, *(_cells(each, names, ratios.values()) for each in rows)]


def _baselines(each: Row) -> dict[str, float]:
    found = each["baselines"]
    assert isinstance(found, dict)
    return found


def _cells(each: Row, names: Sequence[str], ratios: Iterable[str]) -> tuple[str, ...]:
    given = _baselines(each)
    return (
        str(each["name"]),
        _number(each["ours_ms"]),
        *(_number(given[name]) if name in given else "" for name in names),
        *("" if each[ratio] is None else f"{each[ratio]:.2f}" for ratio in ratios),
        _number(each["floor_ms"]),
        f"{each['floor_share']:.0%}",
    )


def _number(value: object) -> str:
    assert isinstance(value, float)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
