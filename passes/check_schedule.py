"""Prove that a schedule of streams, events and scopes is safe, or show the shortest way it is not.

    main:  a ─ record e ─ b ───────── wait f ─ d        proved: every two accesses to one value,
    side:      wait e ─ c ─ record f                    one of them a write, are ordered

Checked, each with its own rule name:

1. `deadlock`: an event awaited before it is recorded, or steps that wait for each other.
2. `race`: two accesses to one value on two streams, one of them a write, with no event between.
3. `memory_reuse`: bytes handed on while another stream may still use them, in a memory plan or by
   a caching allocator that was not told of the other stream.
4. `collective_on_side_stream`: side streams compute only.
5. `core_overcommit`: tasks that may run at once claim more cores than the device has; and two
   unlimited Cube tasks side by side, which take turns at best; and vector work beside a task whose
   cores wait for each other (a collective, a kernel of both units) without limits on both.
6. `not_joined`: a side stream whose end the main stream never awaits.
7. `too_many_streams`: one side stream a layer; side streams are shared by all layers.
8. `scope`: super-kernel scopes balanced, on one stream, of static compute tasks, within the limits
   of name length and count.
9. `unneeded_event`: a wait for what is already past. It costs time, and mostly it got the wrong
   event.

The order is that of `ir/schedule.HappensBefore`. What is not checked: how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridge.ir.schedule import (
    MAIN_STREAM,
    Engine,
    HappensBefore,
    Kind,
    Schedule,
    Step,
    accesses,
    conflicts,
)

# super_kernel_scope: names up to 255 bytes, 1024 scopes (cann-recipes-infer,
# docs/cann/en/super_kernel.md).
MAX_SCOPE_NAME = 255
MAX_SCOPES = 1024
# main, the indexer's, its head weights', and the shared expert's.
MAX_STREAMS = 4

_CUBE = (Engine.CUBE, Engine.MIXED)
_VECTOR = (Engine.VECTOR, Engine.MIXED, Engine.COMMUNICATION)
# Kernels whose cores wait for each other.
_SYNCS = (Engine.MIXED, Engine.COMMUNICATION)


@dataclass(frozen=True)
class Problem:
    """One way in which a schedule is not safe.

    Attributes:
        rule: the rule's name.
        steps: the steps at fault.
        reason: what is wrong, in a sentence.
        remedy: what would make it right.
        path: the shortest chains that show it, one a stream, each from the last common step.
    """

    rule: str
    steps: tuple[str, ...]
    reason: str
    remedy: str
    path: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self.reason}"]
        lines += ["  " + " -> ".join(chain) for chain in self.path]
        return "\n".join([*lines, f"  remedy: {self.remedy}"])


@dataclass(frozen=True)
class Proof:
    """The result: no problems, or all of them, and what was looked at.

    Attributes:
        problems: empty if the schedule is proved.
        tasks: how many tasks were looked at.
        pairs: how many cross-stream pairs of accesses were found ordered.
        streams: how many streams.
        events: how many events.
        scopes: how many super-kernel scopes.
    """

    problems: tuple[Problem, ...]
    tasks: int
    pairs: int
    streams: int
    events: int
    scopes: int

    @property
    def proved(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def shortest(self) -> Problem | None:
        """The race with the shortest chain, or else the first problem."""
        shown = [p for p in self.problems if p.path]
        if shown:
            return min(shown, key=lambda p: sum(len(chain) for chain in p.path))
        return self.problems[0] if self.problems else None


def prove(schedule: Schedule, max_streams: int = MAX_STREAMS) -> Proof:
    """Check every rule of this module over `schedule`."""
    order = HappensBefore(schedule)
    counts = {
        "tasks": len(schedule.tasks),
        "streams": len(schedule.streams),
        "events": len(schedule.events),
        "scopes": sum(s.kind is Kind.SCOPE_BEGIN for s in schedule.steps),
    }
    problems = [*_collectives(schedule), *_stream_count(schedule, max_streams), *_scopes(schedule)]
    if order.stuck is not None:
        stuck = Problem(
            "deadlock",
            order.stuck.steps,
            order.stuck.reason,
            "record each event before it is awaited, and let no two streams wait for each other",
            (order.stuck.steps,),
        )
        return Proof((stuck, *problems), pairs=0, **counts)
    races, pairs = _races(schedule, order)
    problems = [
        *races,
        *_planned_reuse(schedule, order),
        *_allocator_reuse(schedule, order),
        *_unneeded(schedule, order),
        *_cores(schedule, order),
        *_joined(schedule, order),
        *problems,
    ]
    return Proof(tuple(problems), pairs=pairs, **counts)


def _race(order: HappensBefore, first: Step, second: Step, rule: str, what: str) -> Problem:
    fork = order.last_common(first.name, second.name)
    chains = (order.path(fork, first.name), order.path(fork, second.name))
    return Problem(
        rule,
        (first.name, second.name),
        f"{what}: {first.name} on {first.stream!r} and {second.name} on {second.stream!r} "
        "may run in either order",
        f"record an event after {first.name} and await it before {second.name}",
        chains,
    )


def _races(schedule: Schedule, order: HappensBefore) -> tuple[list[Problem], int]:
    problems, ordered = [], 0
    for value, steps in accesses(schedule.steps).items():
        if not any(value in s.writes for s in steps) or len({s.stream for s in steps}) == 1:
            continue
        for first, second in _cross_stream(steps, value):
            if order.precedes(first.name, second.name):
                ordered += 1
            else:
                problems.append(_race(order, first, second, "race", f"value {value!r}"))
    return problems, ordered


def _cross_stream(steps: list[Step], value: str) -> Iterator[tuple[Step, Step]]:
    """Pairs on two streams, in issue order, of which at least one writes the value."""
    for i, first in enumerate(steps):
        for second in steps[i + 1 :]:
            if first.stream != second.stream and conflicts(first, second, value):
                yield first, second


def _planned_reuse(schedule: Schedule, order: HappensBefore) -> Iterator[Problem]:
    """Two values in the same bytes: no access to one may race with an access to the other."""
    uses = accesses(schedule.steps)
    placed = sorted(schedule.memory.items(), key=lambda item: (item[1].pool, item[1].start))
    for i, (name, span) in enumerate(placed):
        for other, span_of_other in placed[i + 1 :]:
            if span_of_other.pool != span.pool or span_of_other.start >= span.stop:
                break
            yield from _reuse(uses.get(name, []), uses.get(other, []), order, f"{name} and {other}")


def _reuse(
    first: list[Step], second: list[Step], order: HappensBefore, what: str
) -> Iterator[Problem]:
    for a in first:
        for b in second:
            if a.name != b.name and not order.ordered(a.name, b.name):
                yield _race(order, a, b, "memory_reuse", f"{what} share memory")
                return


def _allocator_reuse(schedule: Schedule, order: HappensBefore) -> Iterator[Problem]:
    """A value used on another stream, freed to its own: the next task there may get its bytes."""
    uses = accesses(schedule.steps)
    place = {step.name: i for i, step in enumerate(schedule.steps)}
    for value, steps in uses.items():
        if value in schedule.inputs or value in schedule.memory:
            continue
        home = next((s.stream for s in steps if value in s.writes), steps[0].stream)
        foreign = [s for s in steps if s.stream != home]
        foreign = [s for s in foreign if (value, s.stream) not in schedule.recorded_streams]
        released = max(place[s.name] for s in steps)
        taker = _next_task(schedule, released, home)
        for user in foreign:
            if taker is not None and not order.precedes(user.name, taker.name):
                problem = _race(
                    order, user, taker, "memory_reuse", f"{value!r} is freed while still in use"
                )
                yield problem
                break


def _next_task(schedule: Schedule, after: int, stream: str) -> Step | None:
    for step in schedule.steps[after + 1 :]:
        if step.kind is Kind.TASK and step.stream == stream and step.writes:
            return step
    return None


def _unneeded(schedule: Schedule, order: HappensBefore) -> Iterator[Problem]:
    for before, group in _wait_groups(schedule):
        for wait in group:
            record = order.awaited[wait.name]
            others = [order.awaited[w.name] for w in group if w is not wait]
            past = [o for o in others if order.precedes(record, o)]
            if past or (before is not None and order.precedes(record, before.name)):
                yield Problem(
                    "unneeded_event",
                    (wait.name,),
                    f"{wait.stream!r} waits for event {wait.event!r}, which another wait implies",
                    "drop the event, or wait for the one that was meant",
                )


def _wait_groups(schedule: Schedule) -> Iterator[tuple[Step | None, list[Step]]]:
    """Runs of waits with nothing between them on their stream, and the step before each run."""
    for stream in schedule.streams:
        before: Step | None = None
        group: list[Step] = []
        for step in (s for s in schedule.steps if s.stream == stream):
            if step.kind is Kind.WAIT:
                group.append(step)
                continue
            if group:
                yield before, group
            before, group = step, []
        if group:
            yield before, group


def _collectives(schedule: Schedule) -> Iterator[Problem]:
    for step in schedule.tasks:
        if step.engine is Engine.COMMUNICATION and step.stream != MAIN_STREAM:
            yield Problem(
                "collective_on_side_stream",
                (step.name,),
                f"collective {step.name} runs on side stream {step.stream!r}, where replay may "
                "order it differently on each rank",
                "keep collectives on the main stream and move the compute beside them instead",
            )


def _stream_count(schedule: Schedule, limit: int) -> Iterator[Problem]:
    streams = schedule.streams
    if len(streams) > limit:
        yield Problem(
            "too_many_streams",
            (),
            f"{len(streams)} streams ({', '.join(streams[: limit + 1])}, ...), at most {limit}",
            "share one side stream among all layers",
        )


def _joined(schedule: Schedule, order: HappensBefore) -> Iterator[Problem]:
    last = {step.stream: step for step in schedule.steps if step.kind is Kind.TASK}
    main = [s for s in schedule.steps if s.stream == MAIN_STREAM]
    for stream, step in last.items():
        if stream == MAIN_STREAM or (main and order.precedes(step.name, main[-1].name)):
            continue
        yield Problem(
            "not_joined",
            (step.name,),
            f"stream {stream!r} ends with {step.name}, which the main stream never awaits",
            "record an event after it and await it on the main stream",
        )


def _cores(schedule: Schedule, order: HappensBefore) -> Iterator[Problem]:
    busy = [t for t in schedule.tasks if t.engine is not Engine.NONE]
    by_stream: dict[str, list[Step]] = {}
    for task in busy:
        by_stream.setdefault(task.stream, []).append(task)
    side_tasks = [task for task in busy if task.stream != MAIN_STREAM]
    for task in side_tasks:
        beside = {
            stream: order.beside(task.name, others)
            for stream, others in by_stream.items()
            if stream != task.stream
        }
        yield from _fight(task, beside)
        yield from _starve(task, beside)
        yield from _overcommit(schedule, task, beside)


def _fight(task: Step, beside: Mapping[str, Sequence[Step]]) -> Iterator[Problem]:
    """Two Cube tasks at once, at least one of them free to take every core."""
    for others in beside.values():
        for other in others:
            if task.engine in _CUBE and other.engine in _CUBE and None in (task.aic, other.aic):
                yield Problem(
                    "core_overcommit",
                    (other.name, task.name),
                    f"Cube tasks {other.name} on {other.stream!r} and {task.name} on "
                    f"{task.stream!r} may run at once, and not both have a core limit",
                    "order the two with an event, or limit the cores of both",
                )
                return


def _starve(task: Step, beside: Mapping[str, Sequence[Step]]) -> Iterator[Problem]:
    """Vector work at once with a kernel that synchronises its cores, not both limited."""
    for others in beside.values():
        for other in others:
            if other.stream != MAIN_STREAM and other.name < task.name:
                continue
            engines = task.engine, other.engine
            if not all(e in _VECTOR for e in engines) or not any(e in _SYNCS for e in engines):
                continue
            if None in (task.aiv, other.aiv):
                yield Problem(
                    "core_overcommit",
                    (other.name, task.name),
                    f"{other.name} on {other.stream!r} and {task.name} on {task.stream!r} may run at "
                    "once, one of them waits for all its vector cores, and not both have a core limit",
                    "limit the cores of both, or order the two with an event",
                )
                return


def _overcommit(
    schedule: Schedule, task: Step, beside: Mapping[str, Sequence[Step]]
) -> Iterator[Problem]:
    """The claims of what may run beside a task, the largest of each stream, are added up."""
    for unit, device in (("aic", schedule.aic), ("aiv", schedule.aiv)):
        claims = [(task, getattr(task, unit) or 0)]
        for others in beside.values():
            biggest = max(others, key=lambda o: getattr(o, unit) or 0, default=None)
            if biggest is not None:
                claims.append((biggest, getattr(biggest, unit) or 0))
        total = sum(cores for _, cores in claims)
        if len([c for c in claims if c[1]]) > 1 and total > device:
            names = tuple(step.name for step, cores in claims if cores)
            yield Problem(
                "core_overcommit",
                names,
                f"{' + '.join(f'{s.name} {c}' for s, c in claims if c)} = {total} {unit}, "
                f"the device has {device}",
                "lower the limits so that what runs at once fits the device",
            )


def _scopes(schedule: Schedule) -> Iterator[Problem]:
    opened: Step | None = None
    begun = 0
    for step in schedule.steps:
        if step.kind is Kind.SCOPE_BEGIN:
            begun += 1
            yield from _scope_name(step, begun)
            if opened is not None:
                yield _scope_problem(step, f"opens inside scope {opened.event!r}")
            opened = step
        elif step.kind is Kind.SCOPE_END:
            if opened is None or opened.event != step.event:
                yield _scope_problem(step, f"ends scope {step.event!r}, which is not open")
            opened = None
        elif opened is not None and step.kind is Kind.TASK:
            yield from _member(step, opened)
    if opened is not None:
        yield _scope_problem(opened, f"scope {opened.event!r} is never closed")


def _scope_name(step: Step, begun: int) -> Iterator[Problem]:
    if not step.event or len(step.event.encode()) > MAX_SCOPE_NAME:
        yield _scope_problem(step, f"its name has {len(step.event.encode())} bytes")
    if begun == MAX_SCOPES + 1:
        yield _scope_problem(step, f"more than {MAX_SCOPES} scopes")


def _member(step: Step, scope: Step) -> Iterator[Problem]:
    if step.stream != scope.stream:
        yield _scope_problem(step, f"runs on {step.stream!r} inside a scope of {scope.stream!r}")
    if step.engine is Engine.COMMUNICATION:
        yield _scope_problem(step, "is a collective inside a super kernel")
    if not step.static:
        yield _scope_problem(step, "has dynamic shapes inside a super kernel")


def _scope_problem(step: Step, reason: str) -> Problem:
    return Problem(
        "scope",
        (step.name,),
        f"{step.name}: {reason}",
        f"close each scope on the stream that opened it, keep to static compute tasks, "
        f"{MAX_SCOPE_NAME} bytes a name and {MAX_SCOPES} scopes",
    )
