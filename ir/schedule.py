"""Streams and events as a value, and the happens-before order that they make.

A schedule is what the host issues, in order: tasks on streams, events recorded on one stream and
awaited on another, and the bounds of super-kernel scopes. A stream runs its own steps in order;
across streams only an event or a control edge orders anything. `HappensBefore` computes that order
with one vector clock a step, so asking whether a step precedes another costs nothing.

Nothing here knows a graph or a device: passes build schedules, `passes/check_schedule.py` proves
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

MAIN_STREAM = "main"


class Kind(StrEnum):
    """What a step is."""

    TASK = "task"
    RECORD = "record"
    WAIT = "wait"
    SCOPE_BEGIN = "scope_begin"
    SCOPE_END = "scope_end"


class Engine(StrEnum):
    """What a task keeps busy."""

    CUBE = "cube"
    VECTOR = "vector"
    MIXED = "mixed"  # both, in one kernel
    COMMUNICATION = "communication"
    NONE = "none"  # a view, a shape: no kernel


@dataclass(frozen=True)
class Step:
    """One thing the host issues.

    Attributes:
        name: unique in the schedule; a task's name is its graph node's.
        kind: what it is.
        stream: the stream it is issued on.
        event: of a record or a wait, the event's name; of a scope bound, the scope's name.
        reads: of a task, the values it reads.
        writes: of a task, the values it writes; one that it updates in place is in both.
        engine: of a task, what it keeps busy.
        aic: cube cores that it is limited to, None for no limit.
        aiv: vector cores that it is limited to, None for no limit.
        static: whether its shapes are known when it is compiled.
    """

    name: str
    kind: Kind = Kind.TASK
    stream: str = MAIN_STREAM
    event: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    engine: Engine = Engine.VECTOR
    aic: int | None = None
    aiv: int | None = None
    static: bool = True


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a memory pool."""

    pool: str
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        """Whether the two share a byte."""
        return self.pool == other.pool and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Schedule:
    """A whole step of the model as the host issues it.

    Attributes:
        steps: in issue order.
        control_edges: (before, after) pairs of step names, ordered without data.
        memory: where values lie, for those that a memory plan places.
        inputs: values that exist before the first step (weights, caches, arguments).
        recorded_streams: (value, stream) pairs that the allocator was told of, so that it does not
            hand the value's memory on before that stream is past it.
        aic: cube cores of the device.
        aiv: vector cores of the device.
    """

    steps: tuple[Step, ...]
    control_edges: tuple[tuple[str, str], ...] = ()
    memory: Mapping[str, Span] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()
    recorded_streams: frozenset[tuple[str, str]] = frozenset()
    aic: int = 24
    aiv: int = 48

    @property
    def tasks(self) -> tuple[Step, ...]:
        """The steps that compute."""
        return tuple(step for step in self.steps if step.kind is Kind.TASK)

    @property
    def streams(self) -> tuple[str, ...]:
        """Stream names in order of first use."""
        return tuple(dict.fromkeys(step.stream for step in self.steps))

    @property
    def events(self) -> tuple[str, ...]:
        """Event names in order of first use."""
        used = (s.event for s in self.steps if s.kind in (Kind.RECORD, Kind.WAIT))
        return tuple(dict.fromkeys(used))

    def without_event(self, event: str) -> Schedule:
        """This schedule with every record and wait of `event` left out."""
        kept = tuple(
            s for s in self.steps if s.kind not in (Kind.RECORD, Kind.WAIT) or s.event != event
        )
        return replace(self, steps=kept)

    def with_waits_swapped(self, first: str, second: str) -> Schedule:
        """This schedule with each wait for one of two events waiting for the other."""
        other = {first: second, second: first}
        steps = tuple(
            replace(s, event=other[s.event]) if s.kind is Kind.WAIT and s.event in other else s
            for s in self.steps
        )
        return replace(self, steps=steps)


@dataclass(frozen=True)
class Stuck:
    """A schedule that cannot finish: why, and the steps that show it."""

    reason: str
    steps: tuple[str, ...]


class HappensBefore:
    """The partial order of a schedule's steps.

    Attributes:
        stuck: why the schedule cannot finish, or None. The order is only meaningful if None.
        awaited: of each wait, the record that it waits for.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.awaited: dict[str, str] = {}
        self._streams = {name: i for i, name in enumerate(schedule.streams)}
        self._index = {step.name: i for i, step in enumerate(schedule.steps)}
        self._successors: list[list[int]] = [[] for _ in schedule.steps]
        self._predecessors: list[list[int]] = [[] for _ in schedule.steps]
        self._position = [0] * len(schedule.steps)
        self.stuck = self._link() or self._order()

    def precedes(self, before: str, after: str) -> bool:
        """Whether `before` is done when `after` starts, in every run."""
        i, j = self._index[before], self._index[after]
        stream = self._streams[self.schedule.steps[i].stream]
        return i != j and self._clocks[j][stream] >= self._position[i]

    def ordered(self, first: str, second: str) -> bool:
        """Whether one of the two precedes the other."""
        return self.precedes(first, second) or self.precedes(second, first)

    def beside(self, name: str, stream: Sequence[Step]) -> Sequence[Step]:
        """Those steps of one stream, in its order, that may run at once with a step of another.

        A stream runs its steps in order: what precedes the step is a beginning, what follows it an end.
        """
        first = bisect_left(stream, True, key=lambda s: not self.precedes(s.name, name))
        last = bisect_left(stream, True, lo=first, key=lambda s: self.precedes(name, s.name))
        return stream[first:last]

    def last_common(self, first: str, second: str) -> str | None:
        """The latest step that precedes both, or None: from there on the two may race."""
        common = [
            step.name
            for step in self.schedule.steps
            if self.precedes(step.name, first) and self.precedes(step.name, second)
        ]
        return common[-1] if common else None

    def path(self, start: str | None, end: str) -> tuple[str, ...]:
        """A shortest chain of ordered steps from `start` (or any first step) to `end`."""
        goal = self._index[end]
        first = None if start is None else self._index[start]
        came: dict[int, int | None] = {goal: None}
        queue = deque([goal])
        found = goal
        while queue:
            node = found = queue.popleft()
            if node == first or (first is None and not self._predecessors[node]):
                break
            for before in self._predecessors[node]:
                if before not in came:
                    came[before] = node
                    queue.append(before)
        chain: list[str] = []
        at: int | None = found
        while at is not None:
            chain.append(self.schedule.steps[at].name)
            at = came[at]
        return tuple(chain)

    def _edge(self, before: int, after: int) -> None:
        self._successors[before].append(after)
        self._predecessors[after].append(before)

    def _link(self) -> Stuck | None:
        """Add the edges of streams, events and control; say what cannot be awaited."""
        last_on: dict[str, int] = {}
        recorded: dict[str, int] = {}
        for i, step in enumerate(self.schedule.steps):
            if step.stream in last_on:
                self._edge(last_on[step.stream], i)
                self._position[i] = self._position[last_on[step.stream]] + 1
            else:
                self._position[i] = 1
            last_on[step.stream] = i
            if step.kind is Kind.RECORD:
                recorded[step.event] = i
            if step.kind is Kind.WAIT:
                if step.event not in recorded:
                    return self._unrecorded(i)
                self.awaited[step.name] = self.schedule.steps[recorded[step.event]].name
                self._edge(recorded[step.event], i)
        for before, after in self.schedule.control_edges:
            self._edge(self._index[before], self._index[after])
        return None

    def _unrecorded(self, wait: int) -> Stuck:
        step = self.schedule.steps[wait]
        later = [s.name for s in self.schedule.steps[wait:] if s.kind is Kind.RECORD]
        late = [n for n in later if self.schedule.steps[self._index[n]].event == step.event]
        how = "only later" if late else "nowhere"
        reason = f"event {step.event!r} is awaited on {step.stream!r} but recorded {how}"
        return Stuck(reason, (step.name, *late[:1]))

    def _order(self) -> Stuck | None:
        """Give every step its clock, in topological order; a rest that has none is a cycle."""
        width = len(self._streams)
        self._clocks = [[0] * width for _ in self.schedule.steps]
        missing = [len(p) for p in self._predecessors]
        queue = deque(i for i, count in enumerate(missing) if count == 0)
        done = 0
        while queue:
            i = queue.popleft()
            done += 1
            clock = self._clocks[i]
            stream = self._streams[self.schedule.steps[i].stream]
            clock[stream] = max(clock[stream], self._position[i])
            for j in self._successors[i]:
                self._clocks[j] = [max(a, b) for a, b in zip(self._clocks[j], clock, strict=True)]
                missing[j] -= 1
                if missing[j] == 0:
                    queue.append(j)
        if done == len(self.schedule.steps):
            return None
        return Stuck("steps wait for each other in a circle", self._cycle(missing))

    def _cycle(self, missing: list[int]) -> tuple[str, ...]:
        """The steps of one circle among those that never became ready."""
        at = next(i for i, count in enumerate(missing) if count > 0)
        seen: list[int] = []
        while at not in seen:
            seen.append(at)
            at = next(p for p in self._predecessors[at] if missing[p] > 0)
        circle = seen[seen.index(at) :]
        return tuple(self.schedule.steps[i].name for i in reversed(circle))


def conflicts(first: Step, second: Step, value: str) -> bool:
    """Whether the two steps' accesses to one value must be ordered: at least one writes it."""
    touched = (*first.reads, *first.writes), (*second.reads, *second.writes)
    both = all(value in names for names in touched)
    return both and (value in first.writes or value in second.writes)


def accesses(steps: Iterable[Step]) -> dict[str, list[Step]]:
    """For each value, the tasks that read or write it, in issue order."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        if step.kind is Kind.TASK:
            for value in dict.fromkeys((*step.reads, *step.writes)):
                found.setdefault(value, []).append(step)
    return found
