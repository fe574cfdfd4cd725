"""Events as nodes of an FX graph, and the schedule that a graph with streams stands for.

A node's stream is `node.meta["stream"]` (the main one if absent), its super-kernel scope
`node.meta["super_kernel"]`, its core limits (aic, aiv) `node.meta["cores"]`. Events are calls without a result:

    torch.ops.hybridge_schedule.record_event("layer_3_0", "main")
    torch.ops.hybridge_schedule.wait_event("layer_3_0", "side")

They do nothing on the CPU; each target writes them in its own way.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect

from hybridge.ir.cost import engine_of
from hybridge.ir.effects import Effects, is_view
from hybridge.ir.schedule import MAIN_STREAM, Engine, Kind, Schedule, Step

_LIBRARY = torch.library.Library("hybridge_schedule", "DEF")
for _name in ("record_event", "wait_event"):
    _LIBRARY.define(f"{_name}(str event, str stream) -> ()")
    _LIBRARY.impl(_name, lambda event, stream: None, "CompositeExplicitAutograd")

RECORD = torch.ops.hybridge_schedule.record_event.default
WAIT = torch.ops.hybridge_schedule.wait_event.default
for _overload in (RECORD, WAIT):
    has_side_effect(_overload)  # dead code elimination must not take them

STREAM, SUPER_KERNEL, CORES = "stream", "super_kernel", "cores"


def stream_of(node: Node) -> str:
    """The stream that a node runs on."""
    return str(node.meta.get(STREAM, MAIN_STREAM))


def schedule_of(graph: Graph, aic: int, aiv: int) -> Schedule:
    """The schedule that a graph's order, streams, events and scopes stand for.

    Args:
        graph: with metadata; its order is the order of issue.
        aic: Cube cores of the device. aiv: its Vector cores.
    """
    effects = Effects(graph)
    steps: list[Step] = []
    scope = ""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        wanted = str(node.meta.get(SUPER_KERNEL, ""))
        if node.target in (RECORD, WAIT):
            steps.append(_event(node))
            continue
        if wanted != scope:
            steps += _bounds(scope, wanted, node, len(steps))
            scope = wanted
        steps.append(_task(node, effects))
    if scope:
        steps.append(Step(f"end_{scope}", Kind.SCOPE_END, event=scope))
    inputs = frozenset(n.name for n in graph.nodes if n.op in ("placeholder", "get_attr"))
    return Schedule(
        tuple(steps),
        inputs=inputs,
        recorded_streams=_recorded(steps, inputs),
        aic=aic,
        aiv=aiv,
    )


def _event(node: Node) -> Step:
    event, stream = (str(value) for value in node.args)
    kind = Kind.RECORD if node.target is RECORD else Kind.WAIT
    return Step(node.name, kind, stream, event)


def _bounds(scope: str, wanted: str, node: Node, place: int) -> list[Step]:
    stream = stream_of(node)
    found = []
    if scope:
        found.append(Step(f"end_{scope}_{place}", Kind.SCOPE_END, stream, scope))
    if wanted:
        found.append(Step(f"begin_{wanted}_{place}", Kind.SCOPE_BEGIN, stream, wanted))
    return found


def _task(node: Node, effects: Effects) -> Step:
    reads = {root.name for each in node.all_input_nodes for root in effects.roots(each)}
    writes = {root.name for root in effects.written_inputs(node)}
    if node in effects.roots(node):
        writes.add(node.name)
    engine = Engine.NONE if is_view(node) else engine_of(node)
    aic, aiv = node.meta.get(CORES, (None, None))
    return Step(
        node.name,
        Kind.TASK,
        stream_of(node),
        reads=tuple(sorted(reads)),
        writes=tuple(sorted(writes)),
        engine=engine,
        aic=aic,
        aiv=aiv,
        static=not any(_symbolic(size) for size in _sizes(node)),
    )


def _sizes(node: Node) -> list[object]:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]


def _symbolic(size: object) -> bool:
    return isinstance(size, torch.SymInt)


def _recorded(steps: list[Step], inputs: frozenset[str]) -> frozenset[tuple[str, str]]:
    """Every (value, other stream) that a target tells the allocator of: all there are."""
    home: dict[str, str] = {}
    found: set[tuple[str, str]] = set()
    for step in steps:
        for value in step.writes:
            home.setdefault(value, step.stream)
        for value in (*step.reads, *step.writes):
            if value not in inputs and home.get(value, step.stream) != step.stream:
                found.add((value, step.stream))
    return frozenset(found)
