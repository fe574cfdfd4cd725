"""Divide the cores among kernels that run side by side, where one of them cannot do with fewer than it asks.

    main:  dispatch (aiv 36) ──────────── gmm        a collective synchronises its vector cores: if another
    side:      situ (aiv 12)                         stream's kernel holds some of them, it waits for ever

Two kernels that may run at once on two streams, both with vector work, one of them synchronising (a
collective, or a kernel of both units), are given limits that sum within the device, in proportion to their
estimated times. Everything else keeps all cores: a kernel that synchronises nothing takes what is free.
Works on a lowered graph with streams; marks nodes with `meta["cores"]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from hybridge.ir.cost import Machine, cost_of
from hybridge.ir.schedule import MAIN_STREAM, Engine, HappensBefore, Schedule, Step
from hybridge.ir.schedule_ops import CORES, schedule_of

VECTOR_WORK = (Engine.VECTOR, Engine.MIXED, Engine.COMMUNICATION)
SYNCHRONISING = (Engine.MIXED, Engine.COMMUNICATION)
# The side streams together get at least and at most this part of the vector cores.
LEAST_SHARE, MOST_SHARE = 0.125, 0.5


@dataclass(frozen=True)
class CoreLimit:
    """One kernel's limits, and what it runs beside."""

    node: str
    aic: int
    aiv: int
    beside: tuple[str, ...]


def limit_cores(graph: Graph, machine: Machine) -> tuple[CoreLimit, ...]:
    """Set limits where they are needed; a graph on one stream has none."""
    schedule = schedule_of(graph, machine.aic, machine.aiv)
    order = HappensBefore(schedule)
    if order.stuck is not None or len(schedule.streams) < 2:
        return ()
    nodes = {node.name: node for node in graph.nodes}
    beside: dict[str, set[str]] = {}
    for first, second in pairs_that_need_limits(schedule, order):
        beside.setdefault(first.name, set()).add(second.name)
        beside.setdefault(second.name, set()).add(first.name)
    streams = {step.name: step.stream for step in schedule.tasks}
    limits: list[CoreLimit] = []
    for group in _connected(beside):
        shares = _shares([nodes[name] for name in group], streams, machine)
        for name in sorted(group):
            aic, aiv = shares[streams[name]]
            nodes[name].meta[CORES] = (aic, aiv)
            limits.append(CoreLimit(name, aic, aiv, tuple(sorted(beside[name]))))
    return tuple(limits)


def pairs_that_need_limits(schedule: Schedule, order: HappensBefore) -> Iterator[tuple[Step, Step]]:
    """Kernels of two streams with vector work that may run at once, one of them synchronising."""
    work: dict[str, list[Step]] = {}
    for task in schedule.tasks:
        if task.engine in VECTOR_WORK:
            work.setdefault(task.stream, []).append(task)
    streams = sorted(work, key=lambda stream: stream == MAIN_STREAM)  # the main one last
    for place, stream in enumerate(streams):
        for other_stream in streams[place + 1 :]:
            for task in work[stream]:
                for other in order.beside(task.name, work[other_stream]):
                    if task.engine in SYNCHRONISING or other.engine in SYNCHRONISING:
                        yield task, other


def _connected(beside: Mapping[str, Iterable[str]]) -> Iterator[set[str]]:
    """Kernels that share the cores with each other, directly or through others."""
    seen: set[str] = set()
    for start in beside:
        if start in seen:
            continue
        group, pending = set(), [start]
        while pending:
            name = pending.pop()
            if name not in group:
                group.add(name)
                pending += beside[name]
        seen |= group
        yield group


def _shares(
    group: list[Node], streams: Mapping[str, str], machine: Machine
) -> dict[str, tuple[int, int]]:
    """Stream -> (aic, aiv) of the group's kernels on it, by their time."""
    seconds: dict[str, float] = {}
    for node in group:
        stream = streams[node.name]
        seconds[stream] = seconds.get(stream, 0.0) + machine.seconds(cost_of(node))
    sides = [stream for stream in seconds if stream != MAIN_STREAM]
    total = sum(seconds.values())
    part = sum(seconds[stream] for stream in sides) / total if total else LEAST_SHARE
    part = min(max(part, LEAST_SHARE), MOST_SHARE)
    each = max(1, int(machine.aiv * part) // len(sides))
    found = dict.fromkeys(sides, (1, each))
    found[MAIN_STREAM] = (machine.aic - len(sides), machine.aiv - each * len(sides))
    return found
