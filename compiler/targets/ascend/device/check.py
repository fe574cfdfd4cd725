"""Run an artifact's golden case on a device, graph by graph, and time each graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from torch import Tensor

from hybridge.artifacts.errors import ArtifactError, VerifyError
from hybridge.compiler.targets.ascend.device.device import Device
from hybridge.compiler.targets.ascend.device.loading import DeviceArtifact
from hybridge.compiler.targets.ascend.device.session import Placed, Result, Session
from hybridge.compiler.targets.ascend.golden import DeviceTolerance, position_errors

ROWS = 2  # sequences at a time, of different lengths
CHUNKS = 5
WARMUP = 3
TIMED_CONTEXT = 1024
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """One way of running the golden case on one graph.

    Attributes:
        graph: its name. run: "prefill", "prefill in chunks" or "decode".
        positions: how many were compared.
        median: of the positions' errors (`position_errors`). largest: difference of a logit.
        tolerance: of both.
    """

    graph: str
    run: str
    positions: int
    median: float
    largest: float
    tolerance: DeviceTolerance

    @property
    def ok(self) -> bool:
        """Whether both are within tolerance; a NaN is not."""
        return self.median <= self.tolerance.median and self.largest <= self.tolerance.largest


@dataclass(frozen=True)
class Timing:
    """One graph.

    Attributes:
        graph: its name. first_seconds: of the first call, in which GE compiles.
        milliseconds: median of a call after that; 0 if it was not timed.
        tokens: in a call. context: tokens that each row has cached.
    """

    graph: str
    first_seconds: float
    milliseconds: float
    tokens: int
    context: int


@dataclass(frozen=True)
class Report:
    """What a device check found."""

    device: str
    comparisons: tuple[Comparison, ...]
    timings: tuple[Timing, ...]

    @property
    def ok(self) -> bool:
        """Whether all comparisons are within tolerance."""
        return all(each.ok for each in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        comparisons = [{**asdict(each), "ok": each.ok} for each in self.comparisons]
        timings = [asdict(each) for each in self.timings]
        return {
            "device": self.device,
            "ok": self.ok,
            "comparisons": comparisons,
            "timings": timings,
        }

    def raise_if_wrong(self) -> None:
        """Raise for the first comparison that failed.

        Raises:
            VerifyError: values differ by more than the tolerance.
        """
        wrong = [each for each in self.comparisons if not each.ok]
        if wrong:
            first = wrong[0]
            raise VerifyError(
                f"{first.graph}, {first.run}: the median error is {first.median:.3g} (allowed "
                f"{first.tolerance.median:.3g}), the largest difference {first.largest:.3g} "
                f"(allowed {first.tolerance.largest:.3g}); {len(wrong)} of "
                f"{len(self.comparisons)} comparisons failed",
                "compile with --no-streams and --nz off to see whether either is the cause",
            )


def run_check(
    loaded: DeviceArtifact,
    device: Device,
    *,
    repeats: int = 20,
    progress: Progress = lambda _: None,
) -> Report:
    """Compare every graph with the golden case, then time it.

    Args:
        loaded: the artifact. device: to run on. repeats: calls to time, 0 for none.
        progress: told what is being done.

    Raises:
        ArtifactError: the golden case does not fit the buckets.
        CompileError: the device cannot compile a graph.
    """
    return _Check(loaded, device, progress).run(repeats)


class _Check:
    def __init__(self, loaded: DeviceArtifact, device: Device, progress: Progress) -> None:
        self.loaded, self.device, self.progress = loaded, device, progress
        self.tokens = self._fitting_tokens()
        progress("place the weights")
        self.weights: dict[str, Tensor] = {
            name: device.put(*loaded.weight(name)) for name in loaded.forms
        }
        self.prefill = [self._place(graph.name) for graph in loaded.of_phase("prefill")]
        self.decode = [self._place(graph.name) for graph in loaded.of_phase("decode")]

    def _fitting_tokens(self) -> list[int]:
        """The golden tokens, as many as the block tables hold."""
        case = self.loaded.golden
        bucket = next(iter(self.loaded.graphs.values())).bucket
        room = min(bucket.columns, bucket.blocks // ROWS) * bucket.block_size
        if room <= case.prefill_length:
            raise ArtifactError(
                f"the golden prompt has {case.prefill_length} tokens, the buckets hold {room}",
                f"compile with more --buckets columns and blocks (twice {case.prefill_length + 1} tokens)",
            )
        return [int(token) for token in case.token_ids[:room]]

    def _place(self, name: str) -> Placed:
        self.progress(f"{name}: convert")
        graph = self.loaded.graphs[name]
        return Placed(graph, self.device.compile(name, graph.module))

    def run(self, repeats: int) -> Report:
        comparisons, timings = [], []
        for placed in self.prefill:
            timings.append(self._first_call(placed))
            comparisons.append(self._compare(placed, "prefill", self._prefill(placed, 1)))
            chunked = self._prefill(placed, CHUNKS)
            comparisons.append(self._compare(placed, "prefill in chunks", chunked))
        for placed in self.decode:
            timings.append(self._first_call(placed))
            comparisons.append(self._compare(placed, "decode", self._decode(placed)))
        timed = [self._time(timing, repeats) for timing in timings] if repeats else timings
        return Report(self.device.name(), tuple(comparisons), tuple(timed))

    def _session(self, *graphs: Placed) -> Session:
        rows = min(
            ROWS, *(min(each.graph.bucket.sequences, each.graph.bucket.slots) for each in graphs)
        )
        return Session(self.loaded, self.device, self.weights, rows)

    def _prompts(self, session: Session) -> list[list[int]]:
        """Beginnings of the golden prompt, each row's half as long as the one before."""
        whole = self.tokens[: self.loaded.golden.prefill_length]
        return [whole[: max(1, len(whole) >> row)] for row in range(session.rows)]

    def _prefill(self, placed: Placed, chunks: int) -> Iterator[Result]:
        yield from self._fill(self._session(placed), placed, chunks)

    def _fill(self, session: Session, placed: Placed, chunks: int) -> Iterator[Result]:
        """Prefill all rows, no more than the bucket holds at a time."""
        prompts = self._prompts(session)
        share = placed.graph.bucket.tokens // session.rows
        share = max(1, min(share, -(-len(prompts[0]) // chunks)))
        for start in range(0, len(prompts[0]), share):
            new = [prompt[start : start + share] for prompt in prompts]
            yield session.step(placed, new)

    def _decode(self, placed: Placed) -> Iterator[Result]:
        """Decode token by token, behind a prefill by the largest graph."""
        session = self._session(placed, self.prefill[-1])
        list(self._fill(session, self.prefill[-1], 1))
        for _ in range(len(self.tokens) - self.loaded.golden.prefill_length):
            yield session.step(placed, [[self.tokens[length]] for length in session.lengths])

    def _compare(self, placed: Placed, run: str, results: Iterator[Result]) -> Comparison:
        self.progress(f"{placed.graph.name}: {run}")
        case = self.loaded.golden
        assert case.logits is not None
        got: list[Any] = []
        want: list[Any] = []
        for result in results:
            got += list(result.logits)
            want += [case.logits[position - case.logits_start] for position in result.positions]
        errors = position_errors(np.stack(got), np.stack(want))
        largest = np.abs(np.stack(got).astype(np.float64) - np.stack(want)).max()
        return Comparison(
            *(placed.graph.name, run, len(got), float(np.median(errors)), float(largest)),
            self.loaded.tolerance,
        )

    def _first_call(self, placed: Placed) -> Timing:
        graph = placed.graph
        self.progress(f"{graph.name}: first call")
        session, tokens = self._full(placed)
        seconds = self._seconds(placed, session, tokens, 1)
        return Timing(graph.name, seconds[0], 0.0, sum(map(len, tokens)), session.lengths[0])

    def _time(self, timing: Timing, repeats: int) -> Timing:
        self.progress(f"{timing.graph}: time")
        placed = next(p for p in (*self.prefill, *self.decode) if p.graph.name == timing.graph)
        seconds = self._seconds(placed, *self._full(placed), WARMUP + repeats)[WARMUP:]
        return replace(timing, milliseconds=1e3 * median(seconds))

    def _full(self, placed: Placed) -> tuple[Session, list[list[int]]]:
        """Rows that fill the bucket; in decode each has tokens in its cache already."""
        bucket = placed.graph.bucket
        rows = min(bucket.sequences, bucket.slots, bucket.blocks)
        room = min(bucket.columns, bucket.blocks // rows) * bucket.block_size
        session = Session(self.loaded, self.device, self.weights, rows)
        share = min(bucket.tokens // rows, room)
        if placed.graph.phase == "decode":
            session.lengths = [min(TIMED_CONTEXT, room - 1)] * rows
            share = 1
        tokens = self.tokens * (share // len(self.tokens) + 1)
        return session, [tokens[:share]] * rows

    def _seconds(
        self, placed: Placed, session: Session, tokens: list[list[int]], calls: int
    ) -> Sequence[float]:
        """Times of the same call, over and over."""
        inputs, _ = session.batch(placed.graph.bucket, tokens)
        arguments = session.arguments(placed.graph, inputs)
        found = []
        for _ in range(calls):
            self.device.synchronize()
            start = time.perf_counter()
            placed.run(arguments)
            self.device.synchronize()
            found.append(time.perf_counter() - start)
        return found
