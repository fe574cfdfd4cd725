"""Where streams could part: joins whose operands have work of their own, and what runs beside it.

A site is a node with several operands (the indexer's selection, the sum of routed and shared experts). A
branch is what computes one operand and nothing else; a segment is a run of nodes that keeps the same unit
busy. `assign_streams` decides which branch goes where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch.fx import Graph, Node

from hybridge.ir.cost import Machine, cost_of, engine_of
from hybridge.ir.effects import Effects, has_effect, is_view
from hybridge.ir.schedule import Engine

SIDE_STREAMS = ("side", "side_2")
# How far before its join a branch is looked for, in nodes.
WINDOW = 160
_CUBE = (Engine.CUBE, Engine.MIXED)


@dataclass(frozen=True)
class Segment:
    """Nodes in a row that keep the same unit busy."""

    nodes: tuple[Node, ...]
    cube: bool
    seconds: float


@dataclass
class Site:
    """A join, the branches that may leave the main stream, and the main stream beside them."""

    join: Node
    branches: list[list[Node]]
    window: list[Node] = field(default_factory=list)

    @property
    def nodes(self) -> set[Node]:
        """What the site claims for itself."""
        return {*self.window, self.join, *(node for branch in self.branches for node in branch)}


def sites(graph: Graph, machine: Machine) -> Iterator[Site]:
    """Joins in program order whose operands have branches with Cube work of their own."""
    effects = Effects(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(nodes)}
    for join in nodes:
        branches = _leave_main(join, _branches(join, effects, place), machine)
        if branches:
            site = Site(join, branches)
            site.window = _window(site, nodes, place)
            yield site


def _branches(join: Node, effects: Effects, place: dict[Node, int]) -> list[list[Node]]:
    """For each operand, the nodes that only it needs, in program order; those with Cube work."""
    found = []
    for operand in join.all_input_nodes:
        cone = _exclusive_cone(operand, join, place)
        if any(engine_of(n) is Engine.COMMUNICATION for n in cone):
            continue
        if any(has_effect(n) for n in cone) or not any(engine_of(n) in _CUBE for n in cone):
            continue
        found.append(sorted(cone, key=place.__getitem__))
    return found


def _exclusive_cone(operand: Node, join: Node, place: dict[Node, int]) -> set[Node]:
    """Nodes that feed `join` through `operand` and nothing else."""
    cone: set[Node] = set()
    pending = [operand]
    horizon = place[join] - WINDOW
    while pending:
        node = max(pending, key=lambda n: place.get(n, -1))
        pending.remove(node)
        known = node in place and place[node] >= horizon
        if not known or node in cone or not all(u in cone or u is join for u in node.users):
            continue
        cone.add(node)
        pending += node.all_input_nodes
    return cone


def _leave_main(join: Node, branches: list[list[Node]], machine: Machine) -> list[list[Node]]:
    """Which branches move: never all that meet, the longest stays; at most one a side stream."""
    if not branches:
        return []
    ranked = sorted(branches, key=lambda branch: seconds_of(branch, machine), reverse=True)
    other_work = len(branches) < len([n for n in join.all_input_nodes if n.op == "call_function"])
    movable = ranked if other_work else ranked[1:]
    return movable[: len(SIDE_STREAMS)]


def _window(site: Site, nodes: list[Node], place: dict[Node, int]) -> list[Node]:
    """Main-stream nodes from where the branches could start until the join."""
    moved = {node for branch in site.branches for node in branch}
    sources = [n for node in moved for n in node.all_input_nodes if n in place and n not in moved]
    first = max((place[n] for n in sources), default=place[site.join] - WINDOW) + 1
    first = max(first, place[site.join] - WINDOW, 0)
    return [n for n in nodes[first : place[site.join]] if n not in moved]


def seconds_of(nodes: Sequence[Node], machine: Machine) -> float:
    """The estimated time of nodes one after another."""
    return sum(machine.seconds(cost_of(node)) for node in nodes if not is_view(node))


def segments(nodes: Sequence[Node], machine: Machine) -> list[Segment]:
    """Runs of nodes that keep Cube busy, and runs that do not."""
    found: list[Segment] = []
    for cube, run in groupby(nodes, key=lambda n: not is_view(n) and engine_of(n) in _CUBE):
        members = tuple(run)
        found.append(Segment(members, cube, seconds_of(members, machine)))
    return _without_idle_cuts(found)


def _without_idle_cuts(found: list[Segment]) -> list[Segment]:
    """Join Cube segments that only views separate."""
    joined: list[Segment] = []
    for segment in found:
        idle = not segment.cube and segment.seconds == 0.0
        if joined and (idle or segment.cube == joined[-1].cube):
            last = joined.pop()
            nodes = last.nodes + segment.nodes
            joined.append(Segment(nodes, last.cube, last.seconds + segment.seconds))
        else:
            joined.append(segment)
    return joined
