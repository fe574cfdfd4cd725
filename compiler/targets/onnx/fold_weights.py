"""Maths of weights alone is done once, at compile time: its result becomes a derived weight.

    exp(a_log)                                  ->    a_log.exp
    split(unflatten(kv_b, 0, [H, -1]), …)[1]    ->    kv_b.reshape_H_R_C.slice_1_128_256

A runtime would fold it too, but needs the weights' bytes for that before they are mapped, and would keep
its own copy in every session. Only what `hybridge.ir.derived` has a recipe for is folded.
"""

from __future__ import annotations

import itertools
import operator
import re
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hybridge.ir.derived import Recipe
from hybridge.ir.signature import is_weight, weight_name

aten = torch.ops.aten
_RESHAPES = (
    aten.unflatten.int,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.flatten.using_ints,
)
_UNARY = {aten.exp.default: "exp", aten.neg.default: "neg"}
_SPLITS = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.split.sizes,
)


def of_weights_alone(graph: Graph) -> set[Node]:
    """The nodes that depend on nothing but weights, weights included."""
    found: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if is_weight(node) or (inputs and all(item in found for item in inputs)):
            found.add(node)
    return found


def fold_weights(gm: GraphModule) -> int:
    """Rewrite `gm` in place; new recipes go to `gm.meta["derived_weights"]`.

    Returns:
        How many weights were derived.
    """
    recipes: dict[str, Recipe] = gm.meta.setdefault("derived_weights", {})
    known = {weight_name(node): node for node in gm.graph.nodes if is_weight(node)}
    count = 0
    for node in list(gm.graph.nodes):
        step = _step(node)
        if step is None:
            continue
        source, suffix, recipe = step
        name = f"{weight_name(source)}.{suffix}"
        if name not in known:
            recipes[name] = {**recipe, "inputs": [weight_name(source)]}
            known[name] = _weight(gm.graph, name, node.meta["val"])
            count += 1
        node.replace_all_uses_with(known[name])
        gm.graph.erase_node(node)
    return count


def drop_unread_weights(gm: GraphModule) -> None:
    """Erase the weights that nothing reads, and what only cut them, from `gm` in place."""
    for node in reversed(list(gm.graph.nodes)):
        unread = not node.users and (is_weight(node) or node.target in _SPLITS)
        if unread:
            gm.graph.erase_node(node)


def _step(node: Node) -> tuple[Node, str, dict[str, Any]] | None:
    """What a node does to one weight: (the weight, the name's suffix, the recipe without inputs)."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    if node.target is operator.getitem:
        return _slice(node, source)
    if not is_weight(source) or node.all_input_nodes != [source]:
        return None
    if node.target in _UNARY:
        transform = _UNARY[node.target]
        return source, transform, {"transform": transform}
    shape = [int(size) for size in getattr(node.meta["val"], "shape", ())]
    if node.target in _RESHAPES:
        return source, f"reshape_{_joined(shape)}", {"transform": "reshape", "shape": shape}
    order = _order(node, len(shape))
    if order is not None:
        return source, f"permute_{_joined(order)}", {"transform": "permute", "order": order}
    return None


def _slice(node: Node, pieces: Node) -> tuple[Node, str, dict[str, Any]] | None:
    """One piece of a weight that was split."""
    source = pieces.args[0] if pieces.target in _SPLITS else None
    if not isinstance(source, Node) or not is_weight(source):
        return None
    dim = pieces.args[2] if len(pieces.args) > 2 else pieces.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    axis = dim % source.meta["val"].dim()
    sizes = [int(piece.shape[axis]) for piece in pieces.meta["val"]]
    place: Any = node.args[1]
    stop = list(itertools.accumulate(sizes))[place]
    start = stop - sizes[place]
    recipe = {"transform": "slice", "axis": axis, "start": start, "stop": stop}
    return source, f"slice_{axis}_{start}_{stop}", recipe


def _order(node: Node, rank: int) -> list[int] | None:
    """The permutation that a node does, or None."""
    order = list(range(rank))
    axes: Any = node.args[1:]
    if node.target is aten.permute.default:
        return [axis % rank for axis in axes[0]]
    if node.target in (aten.t.default, aten.numpy_T.default):
        return order[::-1]
    if node.target is aten.transpose.int:
        first, second = axes[0] % rank, axes[1] % rank
        order[first], order[second] = order[second], order[first]
        return order
    return None


def _joined(sizes: list[int]) -> str:
    return "_".join(str(size) for size in sizes)


def _weight(graph: Graph, name: str, value: torch.Tensor) -> Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(re.sub(r"\W", "_", name))
    node.meta["val"] = value.new_empty(value.shape)  # no view: it is a tensor of its own
    node.meta["weight"] = name
    return node
