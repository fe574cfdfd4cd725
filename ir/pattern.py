"""Pieces of maths that fusions look for, said once, however a model writes them.

A fusion names the roles of its operands and what may play each; `assignments` tries them, and a proof decides
(see `hybridge.ir.proof`). What a role is about is matched here by meaning: a projection is a product with a constant
weight, be it linear, matmul, mm, einsum or the fused op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from hybridge.ir.effects import op_name
from hybridge.ir.layout import Operand
from hybridge.ir.pass_base import Refusal, same_shape, same_size
from hybridge.ir.signature import dtype_of, is_weight, shape_of


@dataclass(frozen=True)
class Projection:
    """`node` = `x` times `weight` [outputs, inputs] transposed."""

    node: Node
    x: Node
    weight: Node


def projection(node: Node) -> Projection | None:
    """The product with a constant weight that a node is, or None; a bias makes it something else."""
    name, args = op_name(node), node.args
    if name in ("aten::linear", "hybridge::linear"):
        biased = (len(args) > 2 and args[2] is not None) or node.kwargs.get("bias") is not None
        return None if biased else _with_weight(node, args[0], args[1])
    if name in ("aten::matmul", "aten::mm"):
        return _with_weight(node, args[0], _untransposed(args[1]))
    if name == "aten::einsum":
        return _einsum_projection(node)
    return None


def _with_weight(node: Node, x: Any, weight: Any) -> Projection | None:
    if isinstance(x, Node) and isinstance(weight, Node) and is_weight(weight):
        shape = shape_of(weight)
        return Projection(node, x, weight) if shape is not None and len(shape) == 2 else None
    return None


def _untransposed(node: Any) -> Node | None:
    """What a [K, N] operand is the transpose of."""
    if not isinstance(node, Node):
        return None
    name, args = op_name(node), node.args
    swaps = name in ("aten::t", "aten::numpy_T", "aten::mT")
    if name == "aten::transpose":
        swaps = {axis % 2 for axis in args[1:3]} == {0, 1}  # type: ignore[operator]
    if name == "aten::permute":
        swaps = [axis % 2 for axis in args[1]] == [1, 0]  # type: ignore[union-attr,operator]
    return args[0] if swaps and isinstance(args[0], Node) else None


def _einsum_projection(node: Node) -> Projection | None:
    """`...k,nk->...n` in any letters."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    if "->" not in equation or not isinstance(operands, list | tuple) or len(operands) != 2:
        return None
    inputs, result = equation.split("->")
    left, right = inputs.split(",")
    if len(right) != 2 or left[:-1] + right[0] != result or left[-1] != right[1]:
        return None
    return _with_weight(node, operands[0], operands[1])


@dataclass(frozen=True)
class Leaves:
    """Where a region's inputs come from: projections (or joined ones), constants."""

    activations: tuple[Node, ...]
    weights: tuple[Node, ...]


def leaves(
    inputs: Iterable[Node], ignore: Callable[[Node], bool], stop: Collection[Node]
) -> Leaves | None:
    """Follow inputs back to projections and constants; None if they come from anything else.

    Args:
        inputs: of a region.
        ignore: nodes that are no operands (batch metadata).
        stop: nodes that are known operands (the caches).
    """
    activations: dict[Node, None] = {}
    weights: dict[Node, None] = {}
    pending, seen = list(inputs), set(stop)
    while pending:
        node = pending.pop()
        if node in seen or ignore(node):
            continue
        seen.add(node)
        if is_weight(node):
            weights[node] = None
        elif projection(node) is not None or is_joined_projections(node):
            activations[node] = None
        elif node.op == "call_function":
            pending += node.all_input_nodes
        else:
            return None
    return Leaves(tuple(sorted(activations)), tuple(sorted(weights)))


def is_joined_projections(node: Node) -> bool:
    """Whether a node is a concatenation of projections along their outputs."""
    return op_name(node) == "aten::cat" and bool(joined_projections(node))


def joined_projections(node: Node) -> list[Projection]:
    """The projections that a node is, or joins along the last axis, in order; none if it is neither."""
    own = projection(node)
    if own is not None:
        return [own]
    if op_name(node) != "aten::cat":
        return []
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    rank = len(shape_of(node) or ())
    if axis not in (-1, rank - 1):
        return []
    parts = [projection(part) for part in node.args[0]]  # type: ignore[union-attr,arg-type]
    return [part for part in parts if part is not None] if all(parts) else []


def assignments(
    roles: Mapping[str, Callable[[Node], Iterable[Operand]]], nodes: Sequence[Node]
) -> Iterator[dict[str, Operand]]:
    """Every way to give each role one of the nodes, all nodes used, as the operands that fit the role."""
    names = list(roles)
    if len(names) != len(nodes):
        return

    def extend(place: int, left: list[Node]) -> Iterator[dict[str, Operand]]:
        if place == len(names):
            yield {}
            return
        for node in left:
            rest = [other for other in left if other is not node]
            for operand in roles[names[place]](node):
                for tail in extend(place + 1, rest):
                    yield {names[place]: operand, **tail}

    yield from extend(0, list(nodes))


def leaves_of(end: Node, steps: Collection[str], stop: Collection[Node] = ()) -> Leafage:
    """Walk back from `end` through ops of the given names: what was passed, and where the walk ended.

    Args:
        end: counted as passed, whatever its op.
        steps: names of the ops to pass (`aten::mul`).
        stop: nodes to end at, even where their op is one to pass.
    """
    inside, found = {end}, set()
    pending = [end]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in inside:
                continue
            if op_name(node) in steps and node not in stop:
                inside.add(node)
                pending.append(node)
            else:
                found.add(node)
    return Leafage(tuple(sorted(inside)), tuple(sorted(found)))


@dataclass(frozen=True)
class Leafage:
    """The nodes of an expression, and what they are made from; both in program order."""

    inside: tuple[Node, ...]
    leaves: tuple[Node, ...]


def promotion(anchor: Node, x: Node, end: Node) -> Refusal | None:
    """Why an op whose result has its input's dtype cannot stand for `end`, or None (vllm 48324)."""
    if dtype_of(x) == dtype_of(end):
        return None
    return Refusal(
        anchor.name,
        "dtype promotion",
        f"{x.name} is {dtype_of(x)}, {end.name} is {dtype_of(end)}",
        f"cast the result to {dtype_of(x)}, or the input to {dtype_of(end)}",
    )


def is_like(node: Node, x: Node) -> bool:
    """Whether two tensors have the same symbolic shape."""
    left, right = shape_of(node), shape_of(x)
    return left is not None and right is not None and same_shape(left, right)


def constants(nodes: Iterable[Node]) -> list[float]:
    """Every number that is an argument of a call, each once, in order."""
    found: dict[float, None] = {}
    for node in nodes:
        for value in [*node.args, *node.kwargs.values()]:
            if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
                found[float(value)] = None
    return list(found)


def guards(nodes: Iterable[Node]) -> list[float]:
    """The small positive constants: one of them is the eps of a norm."""
    return [value for value in constants(nodes) if 1e-12 <= value <= 1e-2]


def has_size(node: Node, axis: int, size: Any) -> bool:
    """Whether a tensor's axis has a size."""
    shape = shape_of(node)
    return shape is not None and len(shape) > axis and same_size(shape[axis], size)
