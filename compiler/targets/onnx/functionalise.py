"""From effects to values: every write to a cache becomes a node that returns the new cache.

    paged_write(latent_cache_3, rows, slots)            new = paged_write_functional(latent_cache_3, …)
    positions = attend(query, latent_cache_3)     ->    positions = attend(query, new)
    return logits                                       return logits, new

ONNX knows no effects, and a runtime may order nodes as it likes within the data flow. So a read of an old
value must feed, directly or not, the write that replaces it: the runtime writes in place, and a read that
the write does not wait for could see either value. Such a graph is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hybridge.artifacts.errors import CompileError
from hybridge.ir.effects import aliased_arguments, op_name, written_arguments
from hybridge.ops import FusedOp, find

# They read a tensor's size, which no write changes.
_SIZE_ONLY = ("aten::sym_size", "aten::sym_stride", "aten::sym_numel")


@dataclass
class _State:
    """Where the walk is.

    Args:
        current: what holds a written tensor's value now.
        writes: how often each tensor was written, in order of the first write.
        views: view -> the tensor it looks into, and how often that was written when it was made.
        order: node -> its place in the traced program.
    """

    current: dict[Node, Node] = field(default_factory=dict)
    writes: dict[Node, int] = field(default_factory=dict)
    views: dict[Node, tuple[Node, int]] = field(default_factory=dict)
    order: dict[Node, int] = field(default_factory=dict)


def functionalise(gm: GraphModule, caches: tuple[str, ...]) -> dict[str, int]:
    """Rewrite `gm` in place; the new caches follow the outputs it has.

    Args:
        gm: a traced graph; writes are calls of vocabulary ops without users.
        caches: names of the inputs to return, in order.

    Returns:
        How often each cache is written. More than once is right, but a runtime that cannot alias a chain of
        writes copies the cache for each.

    Raises:
        CompileError: a write that is no vocabulary op's or goes through a view, a read whose order against a
            write would be lost, or a cache that is never written.
    """
    state = _State(order={node: place for place, node in enumerate(gm.graph.nodes)})
    for node in list(gm.graph.nodes):
        _visit(node, gm.graph, state)
    _return_caches(gm.graph, caches, state)
    gm.graph.lint()
    gm.recompile()
    return {node.name: state.writes[node] for node in _inputs(gm.graph, caches)}


def _visit(node: Node, graph: Graph, state: _State) -> None:
    _refuse_stale_views(node, state)
    written = written_arguments(node)
    if written:
        _replace_write(node, written, graph, state)
        return
    for argument in aliased_arguments(node):
        root, _ = state.views.get(argument, (argument, 0))
        state.views[node] = (root, state.writes.get(root, 0))
    _use_current(node, state)


def _use_current(node: Node, state: _State) -> None:
    for argument in node.all_input_nodes:
        if argument in state.current:
            node.replace_input_with(argument, state.current[argument])


def _refuse_stale_views(node: Node, state: _State) -> None:
    for argument in node.all_input_nodes:
        root, seen = state.views.get(argument, (argument, None))
        if seen is not None and state.writes.get(root, 0) > seen:
            raise CompileError(
                f"functionalise: node {node.name} reads {argument.name}, a view of {root.name} made before "
                f"{root.name} was written",
                "take the view after the write",
            )


def _replace_write(node: Node, written: list[Node], graph: Graph, state: _State) -> None:
    op = find(node.target)
    if op is None:
        raise CompileError(
            f"functionalise: node {node.name} ({op_name(node)}) writes to {written[0].name} in place",
            "write through an op of the vocabulary (paged_write, state_write), or compute a new tensor",
        )
    for target in written:
        _check_write(node, target, state)
    held = [state.current.get(target, target) for target in written]
    _use_current(node, state)
    with graph.inserting_after(node):
        call = graph.call_function(op.functional, node.args, node.kwargs)
    own = [node.meta["val"]] if op.output_count == 1 else list(node.meta["val"] or ())
    call.meta = {key: value for key, value in node.meta.items() if key != "val"}
    results = _results(call, [*own, *(item.meta["val"] for item in held)], graph)
    for new in (call, *results):
        state.order[new] = state.order[node]
    _hand_over(node, op, results, graph)
    for target, new in zip(written, results[op.output_count :], strict=True):
        state.current[target] = new
        state.writes[target] = state.writes.get(target, 0) + 1


def _results(call: Node, values: list[Any], graph: Graph) -> list[Node]:
    """One node for each value that `call` returns."""
    if len(values) == 1:
        call.meta["val"] = values[0]
        return [call]
    call.meta["val"] = tuple(values)
    results: list[Node] = []
    after = call
    for place, value in enumerate(values):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, place))
        after.meta["val"] = value
        results.append(after)
    return results


def _hand_over(node: Node, op: FusedOp, results: list[Node], graph: Graph) -> None:
    """Give the old node's users the new results, and drop it."""
    if op.output_count == 1:
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(results[place])
            graph.erase_node(user)
    graph.erase_node(node)


def _check_write(node: Node, target: Node, state: _State) -> None:
    if target in state.views:
        raise CompileError(
            f"functionalise: node {node.name} writes through {target.name}, a view of "
            f"{state.views[target][0].name}",
            "write to the whole tensor",
        )
    value = state.current.get(target, target)
    readers = [
        reader for reader in _readers(value, state) if state.order[reader] < state.order[node]
    ]
    if not readers:
        return
    feeding = _ancestors(node, min(state.order[reader] for reader in readers), state)
    for reader in readers:
        if reader not in feeding:
            raise CompileError(
                f"functionalise: node {reader.name} reads {target.name} before node {node.name} writes it, "
                "and the write does not depend on the read",
                "read after the write, or let the written rows depend on what was read",
            )


def _readers(value: Node, state: _State) -> Iterator[Node]:
    """Nodes that read the values of `value`, also through views."""
    for user in value.users:
        if user in state.views:
            yield from _readers(user, state)
        elif not op_name(user).startswith(_SIZE_ONLY):
            yield user


def _ancestors(node: Node, earliest: int, state: _State) -> set[Node]:
    """What `node` depends on, as far back as place `earliest`."""
    found: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        item = waiting.pop()
        if item in found or state.order[item] < earliest:
            continue
        found.add(item)
        waiting.extend(item.all_input_nodes)
    return found


def _inputs(graph: Graph, names: tuple[str, ...]) -> list[Node]:
    found = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    return [found[name] for name in names]


def _return_caches(graph: Graph, caches: tuple[str, ...], state: _State) -> None:
    inputs = _inputs(graph, caches)
    for cache in inputs:
        if cache not in state.writes:
            raise CompileError(
                f"functionalise: the graph never writes {cache.name}",
                "leave a cache that a model does not use out of its signature",
            )
    output = next(iter(reversed(graph.nodes)))
    (results,) = output.args
    own = tuple(results) if isinstance(results, tuple | list) else (results,)
    output.args = ((*own, *(state.current[cache] for cache in inputs)),)
    output.meta["val"] = tuple(
        item.meta["val"] if isinstance(item, Node) else item for item in output.args[0]
    )
    assert all(isinstance(item.meta["val"], torch.Tensor) for item in own)
