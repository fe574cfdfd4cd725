"""Put work beside other work: branches that keep one unit busy run while the other unit is busy.

    main:   k = mm(x, wk)  record a   k_norm(k)   write cache        wait c  wait d   select
    side:                  wait a     q = mm(qr, wq)  record b  ...  record c
    side_2:                           wait b      w = mm(x, ww)      record d

A site is a node with several operands (the indexer's selection, the sum of routed and shared
experts). A branch is what computes one operand and nothing else. Its Cube work is laid beside the
main stream's Vector work and never beside its Cube work; events hold both to that. Which branch and
where is chosen by estimated time from shapes (`ir/cost.py`), not by names:

    gain = time of the branches - what they still delay the main stream - events

Rules: collectives and cache writes stay on the main stream; at most two side streams, shared by all
layers; a branch without Cube work, or with nothing beside it, is refused with its numbers. The
order of issue stays a topological order, so that the graph also runs on one stream. Every site is
proved by itself before it is taken (`check_schedule.prove`), and an event without which the proof
still holds is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, GraphModule, Node

from hybridge.ir.cost import Machine
from hybridge.ir.effects import is_view, op_name
from hybridge.ir.pass_base import Match, PassResult, Refusal
from hybridge.ir.schedule import MAIN_STREAM
from hybridge.ir.schedule_ops import RECORD, STREAM, WAIT, schedule_of, stream_of
from hybridge.passes.check_schedule import prove
from hybridge.passes.limit_cores import limit_cores
from hybridge.passes.stream_sites import SIDE_STREAMS, Segment, Site, seconds_of, segments, sites

# A site must be worth the trouble: at least so many times what an event costs.
LEAST_GAIN = 2.0
# ... and this share of the branches' own time: less is within the error of the estimate.
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Choice:
    """One site with its decision.

    Attributes:
        join: the node where the branches meet. branches: first node of each, with its stream.
        gain: estimated seconds saved, negative for none.
        why: the decision in words, with its numbers.
    """

    join: str
    branches: tuple[str, ...]
    gain: float
    why: str


class AssignStreams:
    """The pass: marks nodes with streams, puts event nodes in, says what it gained."""

    name: ClassVar[str] = "assign_streams"

    def run(self, gm: GraphModule, machine: Machine) -> tuple[PassResult, tuple[Choice, ...]]:
        """Assign streams in place.

        Args:
            gm: a lowered graph with metadata.
            machine: rates to compare times with.
        """
        start = time.perf_counter()
        before = len(gm.graph.nodes)
        choices: list[Choice] = []
        matches: list[Match] = []
        refusals: list[Refusal] = []
        taken: set[Node] = set()
        for plan in _plans(gm.graph, machine):
            choice = plan.refuse_if_taken(taken) or plan.apply()
            choices.append(choice)
            if choice.gain > 0:
                taken.update(plan.site.nodes)
                matches.append(Match(choice.join, choice.branches))
            else:
                refusals.append(
                    Refusal(choice.join, "no gain", choice.why, "none: one stream is as fast")
                )
        limit_cores(gm.graph, machine)
        gm.graph.lint()
        gm.recompile()
        return (
            PassResult(
                self.name,
                tuple(matches),
                tuple(refusals),
                bool(matches),
                before,
                len(gm.graph.nodes),
                0,
                time.perf_counter() - start,
            ),
            tuple(choices),
        )


def _plans(graph: Graph, machine: Machine) -> list[_Plan]:
    """A plan for every site: those with several branches first, then the largest gain.

    Several branches at once (the indexer's query and head weights) need all side streams, so that
    they cannot come second.
    """
    plans = [_Plan(graph, site, machine) for site in sites(graph, machine)]
    return sorted(plans, key=lambda p: (-len(p.side), -p.estimate.gain))


class _Plan:
    """Where each branch's Cube segments go among the main stream's Vector segments."""

    def __init__(self, graph: Graph, site: Site, machine: Machine) -> None:
        self.graph, self.site, self.machine = graph, site, machine
        self.main = segments(site.window, machine)
        self.side = [segments(branch, machine) for branch in site.branches]
        self.names = tuple(branch[0].name for branch in site.branches)
        self.events = 0
        self.places: list[int] = []
        self.estimate = self._estimate()

    def _estimate(self) -> Choice:
        event = self.machine.event
        total = sum(seconds_of(branch, self.machine) for branch in self.site.branches)
        gaps = [i for i, s in enumerate(self.main) if not s.cube and s.seconds > 0.0]
        if not gaps:
            return self._choice(0.0, "no Vector work beside the branch")
        self.places, delay = self._place(gaps)
        # One starts the side, one more an each further piece of Cube work, one ends each branch.
        events = len(self.places) + len(self.side)
        gain = total - delay - events * event
        told = (
            f"branches {total * 1e6:.1f} us, delay of the main stream {delay * 1e6:.1f} us, "
            f"{events} events {events * event * 1e6:.1f} us; beside {self._beside()}"
        )
        if gain < max(LEAST_GAIN * event, LEAST_SHARE * total):
            return self._choice(min(gain, 0.0), f"not worth it: {told}")
        return self._choice(gain, told)

    def _beside(self) -> str:
        """The main stream's longest kernel in each gap that side work is laid beside."""
        found = []
        for gap in dict.fromkeys(self.places):
            nodes = self.main[gap].nodes
            longest = max(nodes, key=lambda n: seconds_of([n], self.machine))
            found.append(op_name(longest).split("::")[-1])
        return ", ".join(dict.fromkeys(found))

    def _choice(self, gain: float, why: str) -> Choice:
        return Choice(self.site.join.name, self.names, gain, why)

    def refuse_if_taken(self, taken: set[Node]) -> Choice | None:
        """A refusal if a better site has already laid streams over this one's nodes."""
        if self.estimate.gain > 0.0 and taken.intersection(self.site.nodes):
            return self._choice(0.0, "a site with a larger gain uses these nodes")
        return None

    def apply(self) -> Choice:
        """Change the graph, if it is worth it and can be proved."""
        if self.estimate.gain <= 0.0:
            return self.estimate
        undo = _Snapshot(self.graph)
        self._issue(self.places)
        unproved = self._settle()
        if unproved:
            undo.restore()
            return self._choice(0.0, f"not proved: {unproved}")
        return self.estimate

    def _cube_segments(self) -> list[tuple[int, Segment]]:
        """(branch, segment) of all Cube work on the side, in the order in which it runs."""
        return [(b, s) for b, parts in enumerate(self.side) for s in parts if s.cube]

    def _place(self, gaps: list[int]) -> tuple[list[int], float]:
        """For each side Cube segment, a gap of the main stream, in order; the least delay."""
        work = [segment.seconds for _, segment in self._cube_segments()]
        best: dict[tuple[int, int], tuple[float, list[int]]] = {}

        def least(item: int, gap: int) -> tuple[float, list[int]]:
            """Segments item.. into gaps gap.., the first taking any number of them."""
            if item == len(work):
                return 0.0, []
            if gap == len(gaps):
                return sum(work[item:]), [gaps[-1]] * (len(work) - item)
            if (item, gap) not in best:
                room = self.main[gaps[gap]].seconds
                options = []
                for end in range(item, len(work) + 1):
                    rest, later = least(end, gap + 1)
                    over = max(0.0, sum(work[item:end]) - room)
                    options.append((over + rest, [gaps[gap]] * (end - item) + later))
                best[item, gap] = min(options, key=lambda option: option[0])
            return best[item, gap]

        delay, places = least(0, 0)
        return places, delay

    # ---------------------------------------------------------------- writing it into the graph

    def _issue(self, places: list[int]) -> None:
        """Move the branches' nodes to their gaps, mark them, and put all events that may matter."""
        cubes = self._cube_segments()
        gap_of = {id(segment): gap for (_, segment), gap in zip(cubes, places, strict=True)}
        before: str | None = None
        for branch, parts in enumerate(self.side):
            stream = SIDE_STREAMS[branch]
            started = False
            for part in parts:
                gap = gap_of.get(id(part))
                if gap is not None or not started:
                    anchor = self._gap_start(gap if gap is not None else places[0])
                    self._event_pair(anchor, MAIN_STREAM, stream)
                    if before is not None and before != stream:
                        self._event_pair(anchor, before, stream)
                    started = True
                self._move(part.nodes, anchor, stream)
                if part.cube and gap is not None:
                    before = stream
                    following = self._next_cube(gap)
                    if following is not None:
                        self._guard(anchor, following, stream)
            self._guard(anchor, self.site.join, stream)

    def _gap_start(self, gap: int) -> Node:
        """The first node of a main Vector segment: side work is issued just before it."""
        return self.main[gap].nodes[0]

    def _next_cube(self, gap: int) -> Node | None:
        """The first main Cube node after a gap."""
        later = (s for s in self.main[gap + 1 :] if s.cube)
        segment = next(later, None)
        return segment.nodes[0] if segment is not None else None

    def _name(self) -> str:
        self.events += 1
        return f"{self.site.join.name}_{self.events}"

    def _call(self, overload: object, event: str, stream: str, anchor: Node) -> None:
        with self.graph.inserting_before(anchor):
            node = self.graph.call_function(overload, (event, stream))  # type: ignore[arg-type]
        node.meta["val"] = None
        node.meta[STREAM] = stream

    def _event_pair(self, anchor: Node, giver: str, taker: str) -> None:
        """Record on one stream and await on another, both issued before `anchor`."""
        event = self._name()
        self._call(RECORD, event, giver, anchor)
        self._call(WAIT, event, taker, anchor)

    def _guard(self, anchor: Node, waiter: Node, stream: str) -> None:
        """Record the side's work so far, issued before `anchor`; the main stream awaits it."""
        event = self._name()
        self._call(RECORD, event, stream, anchor)
        self._call(WAIT, event, MAIN_STREAM, waiter)

    def _move(self, nodes: Sequence[Node], anchor: Node, stream: str) -> None:
        for node in nodes:
            anchor.prepend(node)
            node.meta[STREAM] = stream

    def _settle(self) -> str:
        """Drop events that the proof does not need; why it fails without any dropped, or ""."""
        local = _neighbourhood(self.graph, self.site)
        limit_cores(local, self.machine)
        schedule = schedule_of(local, self.machine.aic, self.machine.aiv)
        prefix = f"{self.site.join.name}_"
        ours = [event for event in schedule.events if event.startswith(prefix)]
        for event in ours:
            fewer = schedule.without_event(event)
            if _only_unneeded(fewer):
                schedule = fewer
                for node in list(self.graph.nodes):
                    if node.target in (RECORD, WAIT) and node.args[0] == event:
                        self.graph.erase_node(node)
        problem = prove(schedule).shortest()
        return str(problem) if problem is not None else ""


def _only_unneeded(schedule: object) -> bool:
    proof = prove(schedule)  # type: ignore[arg-type]
    return all(problem.rule == "unneeded_event" for problem in proof.problems)


def _neighbourhood(graph: Graph, site: Site) -> Graph:
    """The part of the graph that a site touches, as a graph of its own."""
    moved = {node for branch in site.branches for node in branch}
    sources = {n for node in moved for n in node.all_input_nodes if n.op == "call_function"}
    members = {*site.nodes, *sources}
    local = Graph()
    copied: dict[Node, Node] = {}

    def known(node: Node) -> Node:
        if node not in copied:
            copied[node] = local.placeholder(node.name)
            copied[node].meta = dict(node.meta)
        return copied[node]

    nodes = [n for n in graph.nodes if n in members or _ours(n, site)]
    for node in nodes:  # inputs first: a placeholder follows no call
        for argument in node.all_input_nodes:
            if argument not in members:
                known(argument)
    for node in nodes:
        copied[node] = local.node_copy(node, known)
        copied[node].name = node.name
        copied[node].meta = dict(node.meta)
    return local


def _ours(node: Node, site: Site) -> bool:
    if node.target not in (RECORD, WAIT):
        return False
    return str(node.args[0]).startswith(f"{site.join.name}_")


class _Snapshot:
    """The order and streams of a graph, to go back to."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = [node for node in graph.nodes if node.op == "call_function"]
        self.streams = {node: stream_of(node) for node in self.order}

    def restore(self) -> None:
        """Take out what was put in, and move back what was moved."""
        kept = set(self.order)
        for node in list(self.graph.nodes):
            if node.op == "call_function" and node not in kept:
                self.graph.erase_node(node)
        output = next(node for node in self.graph.nodes if node.op == "output")
        for node in self.order:
            output.prepend(node)
            node.meta[STREAM] = self.streams[node]


def explain(choices: Sequence[Choice]) -> list[dict[str, object]]:
    """The choices as plain data, for the artifact."""
    return [
        {
            "join": c.join,
            "branches": list(c.branches),
            "gain_us": round(c.gain * 1e6, 2),
            "why": c.why,
        }
        for c in choices
    ]


def kinds(gm: GraphModule) -> dict[str, int]:
    """How many nodes each stream runs, views left out."""
    found: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_view(node) and op_name(node) != "getitem":
            found[stream_of(node)] = found.get(stream_of(node), 0) + 1
    return found
