"""Regions: the nodes that one fused op would replace, what they read, and who else looks inside.

A region is found from its ends: everything between the nodes that it starts from (a cache read, a stack of sources)
and its outputs. Nothing is assumed about how the maths in it is written.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.fx import Node

from hybridge.ir.effects import Effects, has_effect, is_assertion, is_random, written_arguments
from hybridge.ir.signature import value_of


@dataclass(frozen=True)
class Region:
    """Nodes that compute `outputs` from `inputs`, in program order; `writes` are those with effects."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    @property
    def writes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if written_arguments(node))


def forward(seeds: Iterable[Node], last: Node | None = None, limit: int = 4000) -> Iterator[Node]:
    """Nodes that depend on the seeds (seeds first), in program order, up to `last` or `limit` nodes."""
    heap = list(seeds)
    heapq.heapify(heap)
    seen = set(heap)
    for _ in range(limit):
        if not heap:
            return
        node = heapq.heappop(heap)
        if node.op == "output" or (last is not None and last < node):
            continue
        yield node
        for user in node.users:
            if user not in seen:
                seen.add(user)
                heapq.heappush(heap, user)


def cone(
    outputs: Iterable[Node], stop: Collection[Node], effects: Effects | None = None
) -> list[Node]:
    """Nodes that the outputs are computed from, back to (without) `stop`, in program order.

    Sizes are not followed: they are known from the recorded shapes. With `effects`, in-place writes to tensors that
    the cone itself makes are part of it. If `stop` leaves out an input of the graph, the search ends there: the cone
    is then not whole, and holds that input (see `open_input`).
    """
    found: set[Node] = set()
    pending = [node for node in outputs if node not in stop]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node.op != "call_function":
            break
        needed = list(node.all_input_nodes)
        if effects is not None:
            needed += _local_writes(node, effects)
        pending += [
            argument
            for argument in needed
            if argument not in found and argument not in stop and not is_size(argument)
        ]
    return sorted(found)


def open_input(nodes: Iterable[Node]) -> Node | None:
    """The input of the graph that a cone reached, which `stop` left out; None if the cone is whole."""
    return next((node for node in nodes if node.op != "call_function"), None)


def _local_writes(node: Node, effects: Effects) -> list[Node]:
    """In-place writes to the tensor that `node` holds, unless it is a graph input."""
    if any(root.op in ("placeholder", "get_attr") for root in effects.roots(node)):
        return []
    return effects.writes_to(node)


def is_size(node: Node) -> bool:
    """Whether a node is a (symbolic) number, not a tensor."""
    return isinstance(value_of(node), int | float | bool | torch.SymInt | torch.SymBool)


def between(seeds: Collection[Node], outputs: Collection[Node], effects: Effects) -> Region:
    """The region from `seeds` (included) to `outputs`: what depends on a seed and is needed by an output."""
    last = max(outputs)
    needed = set(cone_within(outputs, min(seeds), effects))
    nodes = [node for node in forward(seeds, last) if node in needed]
    nodes = _with_private_constants(nodes, effects)
    return make_region(nodes, outputs)


def cone_within(outputs: Iterable[Node], first: Node, effects: Effects) -> list[Node]:
    """`cone` limited to nodes from `first` on in program order."""
    found: set[Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node in found or node < first:
            continue
        found.add(node)
        pending += [*node.all_input_nodes, *_local_writes(node, effects)]
    return sorted(found)


def _with_private_constants(nodes: list[Node], effects: Effects) -> list[Node]:
    """Add the writes into tensors of the region, which `forward` reaches only through the written tensor."""
    found = set(nodes)
    for node in nodes:
        for write in effects.writes_to(node) if _is_local(node, effects) else []:
            found.add(write)
    return sorted(found)


def _is_local(node: Node, effects: Effects) -> bool:
    return all(root.op not in ("placeholder", "get_attr") for root in effects.roots(node))


def make_region(nodes: Iterable[Node], outputs: Iterable[Node]) -> Region:
    """A region of exactly these nodes; its inputs are what they use from outside."""
    ordered = tuple(sorted(set(nodes)))
    inside = set(ordered)
    inputs: dict[Node, None] = {}
    for node in ordered:
        for argument in node.all_input_nodes:
            if argument not in inside:
                inputs[argument] = None
    return Region(ordered, tuple(inputs), tuple(outputs))


def escapes(region: Region) -> tuple[Node, Node] | None:
    """(intermediate, user) where a node outside the region uses one of its intermediates, or None.

    Assertions and unused results do not count: they go with what they look at.
    """
    inside, outputs = set(region.nodes), set(region.outputs)
    for node in region.nodes:
        if node in outputs:
            continue
        for user in node.users:
            if user not in inside and not is_idle(user):
                return node, user
    return None


def is_idle(node: Node) -> bool:
    """Whether a node only asserts, or computes what nobody uses."""
    return is_assertion(node) or (not node.users and not has_effect(node))


def first_random(region: Region) -> Node | None:
    """The first node of a region that draws random numbers, or None."""
    return next((node for node in region.nodes if is_random(node)), None)


def insertion_point(region: Region) -> Node:
    """The node before which the fused op goes: after the whole region unless an output is used earlier."""
    inside = set(region.nodes)
    users = [user for output in region.outputs for user in output.users if user not in inside]
    after = max(region.nodes).next
    return min([after, *users]) if after.op != "root" else min(users)


def approach(region: Region, reads: Collection[Node], effects: Effects) -> list[Node]:
    """The calls between `reads` and a region that is replaced by an op of them: the op does their work again."""
    stop, found = {*reads, *region.nodes}, set()
    pending = list(region.inputs)
    while pending:
        node = pending.pop()
        if node in stop or node in found or node.op != "call_function" or is_size(node):
            continue
        found.add(node)
        pending += [*node.all_input_nodes, *_local_writes(node, effects)]
    return sorted(found)


@dataclass(frozen=True)
class Conflict:
    """A read or write of the region that another node's effect separates from the insertion point."""

    access: Node
    other: Node
    storage: Node
    kind: str


def conflict(
    region: Region,
    point: Node,
    effects: Effects,
    reads: Collection[Node] = (),
    earlier: Mapping[Node, Node] = MappingProxyType({}),
) -> Conflict | None:
    """The first effect that forbids accessing at `point` what the region accesses where it is, or None.

    A read may not move over a write; a write may not move over a write or a read of the same storage.

    Args:
        region: its reads and writes move.
        point: the node before which they would be.
        effects: of the graph.
        reads: what is read at `point`, if that is not the region's inputs: what these are made from.
        earlier: value -> the node that reads it instead, before the region.
    """
    inside = set(region.nodes)
    for access, value in _moved_reads(region, reads or region.inputs, earlier, effects):
        for write in effects.writes_to(value):
            if write not in inside and access <= write < point:
                return Conflict(access, write, min(effects.roots(value)), "write")
    for write in region.writes:
        found = _read_between(write, point, inside, effects)
        if found is not None:
            return found
    return None


def _moved_reads(
    region: Region, reads: Collection[Node], earlier: Mapping[Node, Node], effects: Effects
) -> Iterator[tuple[Node, Node]]:
    """(the node that reads first, value) of what is read elsewhere than in the graph as it is."""
    nodes = [*approach(region, reads, effects), *region.nodes]
    made, read = set(nodes), set()
    for node in nodes:
        for argument in node.all_input_nodes:
            if argument not in made:
                read.add(argument)
                yield node, argument
    yield from ((value, value) for value in reads if value not in read)
    yield from ((reader, value) for value, reader in earlier.items())


def _read_between(write: Node, point: Node, inside: set[Node], effects: Effects) -> Conflict | None:
    for storage in effects.written_inputs(write):
        for user in _users_of_storage(storage, effects):
            if user not in inside and write < user < point:
                return Conflict(write, user, storage, "read")
    return None


def _users_of_storage(storage: Node, effects: Effects) -> Iterator[Node]:
    """Every node that reads the storage, directly or through a view."""
    pending, seen = [storage], {storage}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if storage in effects.roots(user):
                pending.append(user)


def erase(nodes: Iterable[Node], on_erase: Callable[[Node], None]) -> list[Node]:
    """Erase nodes, last first, with what idly looks at them; returns those that are still used."""
    left = []
    for node in sorted(nodes, reverse=True):
        for user in list(node.users):
            if is_idle(user):
                on_erase(user)
                user.graph.erase_node(user)
        if node.users:
            left.append(node)
            continue
        on_erase(node)
        node.graph.erase_node(node)
    return left


def erase_unused(nodes: Iterable[Node], on_erase: Callable[[Node], None]) -> None:
    """Erase those of `nodes` that nothing uses and that have no effect, and what then becomes unused."""
    pending = sorted(set(nodes), reverse=True)
    gone: set[Node] = set()
    while pending:
        node = pending.pop(0)
        if node in gone or has_effect(node) or is_assertion(node):
            continue
        if any(not is_idle(user) for user in node.users):
            continue
        inputs = list(node.all_input_nodes)
        users = list(node.users)
        gone.update([node, *users])
        erase([node], on_erase)
        pending += [argument for argument in inputs if argument not in gone]
