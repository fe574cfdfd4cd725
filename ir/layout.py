"""Which node holds an operand, whatever views, permutes and unit axes lie around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import Rewriter, same_size
from hybridge.ir.signature import shape_of, weight_name

aten = torch.ops.aten

#: Ops that only move elements: the result holds the argument's values, and no others.
MOVEMENT = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten"),
        *("unsqueeze", "squeeze", "expand", "expand_as"),
        *("permute", "transpose", "t", "movedim", "swapaxes", "numpy_T", "mT"),
        *("contiguous", "clone", "alias", "detach", "lift_fresh_copy"),
    )
)


@dataclass(frozen=True)
class Operand:
    """A node that holds an operand, and how to get the operand's own axes from the node's.

    Args:
        node: the holder.
        axes: for each axis of the operand, the node's axis; the node's other axes are of size one.
    """

    node: Node
    axes: tuple[int, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)

    def sizes(self) -> list[Any]:
        """The (symbolic) sizes of the operand's axes."""
        shape = shape_of(self.node) or ()
        return [shape[axis] for axis in self.axes]

    def to_nodes(self, value: Tensor) -> dict[Node, Tensor]:
        """The value of every node that holds the operand."""
        return {self.node: self.to_node(value)}

    def from_node(self, value: Tensor) -> Tensor:
        """The operand, from the node's value."""
        rest = [axis for axis in range(value.dim()) if axis not in self.axes]
        return value.permute(*self.axes, *rest).reshape([value.shape[axis] for axis in self.axes])

    def to_node(self, value: Tensor) -> Tensor:
        """The node's value, from the operand."""
        rank = len(shape_of(self.node) or ())
        rest = [axis for axis in range(rank) if axis not in self.axes]
        wide = value.reshape(*value.shape, *(1,) * len(rest))
        order = [*self.axes, *rest]
        return wide.permute([order.index(axis) for axis in range(rank)]).contiguous()

    def emit(self, rewriter: Rewriter) -> Node:
        """Nodes that compute the operand; none if the node already has its axes."""
        rank = len(shape_of(self.node) or ())
        rest = [axis for axis in range(rank) if axis not in self.axes]
        order = [*self.axes, *rest]
        node = self.node
        if order != list(range(rank)):
            node = rewriter.call(aten.permute.default, node, order)
        for _ in rest:
            node = rewriter.call(aten.squeeze.dim, node, len(self.axes))
        return node


@dataclass(frozen=True)
class Joined:
    """An operand that lies in several nodes: part after part along its `axis`."""

    parts: tuple[Operand, ...]
    axis: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(part.node for part in self.parts)

    @property
    def axes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(part.axes for part in self.parts)

    def sizes(self) -> list[Any]:
        """The sizes of the whole operand."""
        whole = self.parts[0].sizes()
        whole[self.axis] = sum(part.sizes()[self.axis] for part in self.parts)
        return whole

    def to_nodes(self, value: Tensor) -> dict[Node, Tensor]:
        """The value of every part's node."""
        widths = [part.sizes()[self.axis] for part in self.parts]
        split = value.split(widths, dim=self.axis)
        pairs = zip(self.parts, split, strict=True)
        return {part.node: part.to_node(piece) for part, piece in pairs}

    def emit(self, rewriter: Rewriter) -> Node:
        """Nodes that join the parts; constant parts make one derived weight."""
        names = [weight_name(part.node) for part in self.parts]
        if None in names:
            parts = [part.emit(rewriter) for part in self.parts]
            return rewriter.call(aten.cat.default, parts, self.axis)
        first = self.parts[0]
        whole = rewriter.derived_weight(
            f"{str(names[0]).removesuffix('.weight')}.joined",
            {"transform": "concat", "inputs": names, "axis": first.axes[self.axis]},
            self.nodes,
        )
        return Operand(whole, first.axes).emit(rewriter)


def sources(node: Node) -> Iterator[Node]:
    """The node, and the nodes whose elements it holds rearranged, nearest first."""
    yield node
    while op_name(node) in MOVEMENT and isinstance(node.args[0], Node):
        node = node.args[0]
        yield node


def operands(node: Node, sizes: Sequence[Any]) -> Iterator[Operand]:
    """The ways to read an operand of the given (symbolic) sizes from a node or what it rearranges.

    Args:
        sizes: of the operand's axes; None is any size.
    """
    for holder in sources(node):
        shape = shape_of(holder)
        if shape is None:
            continue
        yield from (Operand(holder, axes) for axes in _assignments(shape, sizes))


def _assignments(shape: Sequence[Any], sizes: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """Axes of `shape` that have the wanted sizes, the natural order first; all others must be one."""
    for axes in itertools.permutations(range(len(shape)), len(sizes)):
        fits = all(
            size is None or same_size(shape[axis], size)
            for axis, size in zip(axes, sizes, strict=True)
        )
        rest = (axis for axis in range(len(shape)) if axis not in axes)
        if fits and all(same_size(shape[axis], 1) for axis in rest):
            yield axes
