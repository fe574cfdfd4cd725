"""Weights as the lowered graph reads them: casts and rearrangements done once, not in every step.

Where a lowered graph only ever reads a weight through the same operations (a cast, a transposition
that is made contiguous, an exponential), these are taken out of the graph and become the weight's
`steps`, which are run once when the weight is written or loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from hybridge.ops.moe import decode_mxfp4

# What may be done beforehand: unary, without data-dependent shapes.
_FOLDABLE = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.flip.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.exp.default,
    torch.ops.aten.neg.default,
    torch.ops.aten.select.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.constant_pad_nd.default,
}
# Views alone are free; only a chain with one of these is worth taking out.
_COSTLY = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.flip.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.exp.default,
    torch.ops.aten.neg.default,
    torch.ops.aten.constant_pad_nd.default,
}
_BY_NAME = {str(target): target for target in _FOLDABLE}


@dataclass(frozen=True)
class PreparedWeight:
    """One weight input of a lowered graph.

    Attributes:
        name: of the input.
        source: the model's parameter, or the derived weight, that it is made from.
        shape: as the graph reads it.
        dtype: as the graph reads it.
        steps: aten operations, in order, from the source (cast to the graph's dtype) to this: each
            (name, arguments after the tensor, keyword arguments). `decode_mxfp4` comes first if at
            all.
        scale_source: of an MXFP4 weight that is decoded, its scales.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...] = ()
    scale_source: str = ""


def prepare_weights(
    gm: fx.GraphModule, weights: Sequence[PreparedWeight]
) -> tuple[PreparedWeight, ...]:
    """Take foldable chains out of the graph; the weights as the graph reads them afterwards."""
    inputs = {node.name: node for node in gm.graph.nodes if node.op == "placeholder"}
    prepared = []
    for weight in weights:
        node = inputs[weight.name]
        if not node.users:
            gm.graph.erase_node(node)  # a weight that the lowered form does not read
            continue
        prepared.append(_fold(gm, node, weight))
    gm.recompile()
    return tuple(prepared)


def _fold(gm: fx.GraphModule, node: fx.Node, weight: PreparedWeight) -> PreparedWeight:
    chain = _chain(node)
    last = max((i for i, each in enumerate(chain) if each.target in _COSTLY), default=-1)
    chain = chain[: last + 1]
    if not chain:
        return weight
    node.meta["val"] = chain[-1].meta["val"]
    chain[-1].replace_all_uses_with(node)
    for each in reversed(chain):
        gm.graph.erase_node(each)
    value = node.meta["val"]
    steps = (*weight.steps, *(_step(each) for each in chain))
    return replace(weight, shape=tuple(value.shape), dtype=value.dtype, steps=steps)


def _chain(node: fx.Node) -> list[fx.Node]:
    """Foldable nodes after `node`, each the only user of the one before."""
    found: list[fx.Node] = []
    while len(node.users) == 1:
        (node,) = node.users
        others = [a for a in node.args[1:] if isinstance(a, fx.Node)]
        if node.target not in _FOLDABLE or others:
            break
        found.append(node)
    return found


def _step(node: fx.Node) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    kept = {k: v for k, v in node.kwargs.items() if k in ("dtype", "memory_format")}
    return str(node.target), tuple(node.args[1:]), tuple(kept.items())


# Steps that compute; what they are given is fp32 at least, whatever the checkpoint holds.
_ARITHMETIC = {"aten.exp.default", "aten.neg.default"}
_ELEMENTWISE = {*_ARITHMETIC, "aten._to_copy.default", "aten.clone.default", "decode_mxfp4"}


def apply_steps(weight: PreparedWeight, value: Tensor, scale: Tensor | None = None) -> Tensor:
    """The weight as the graph reads it, from its source's value (and its scales').

    A value wider than the graph's own input (an fp32 checkpoint) is rounded once, at the end, or
    not at all where the graph would widen it again.
    """
    computes = any(name in _ARITHMETIC for name, _, _ in weight.steps)
    if computes and value.is_floating_point():
        value = value.to(torch.promote_types(value.dtype, torch.float32))
    for name, args, kwargs in weight.steps:
        if name == "decode_mxfp4":
            assert scale is not None
            value = decode_mxfp4(value, scale)
        elif name != "aten._to_copy.default":  # casts are the last line's
            value = _BY_NAME[name](value, *args, **dict(kwargs))
    return value.to(weight.dtype)


def by_rows(weight: PreparedWeight, rank: int) -> tuple[PreparedWeight, int] | None:
    """How a weight is made from some rows of its source's first axis at a time.

    Args:
        weight: to make. rank: dimensions of its source.

    Returns:
        The weight without cuts of the first axis, and the source's row that is its first; None if
        its steps need the whole source.
    """
    start, kept = 0, []
    for step in weight.steps:
        name, args, _ = step
        if name == "aten.slice.Tensor" and tuple(args[:1]) == (0,) and len(args) <= 3:
            start += args[1]
            continue
        swaps = name == "aten.transpose.int" and 0 not in {axis % rank for axis in args}
        if name not in _ELEMENTWISE and not swaps:
            return None
        kept.append(step)
    return replace(weight, steps=tuple(kept)), start


def describe_steps(weight: PreparedWeight) -> list[str]:
    """The steps as text, for the weights plan."""
    texts = []
    for name, args, kwargs in weight.steps:
        shown = ", ".join([*map(str, args), *(f"{k}={v}" for k, v in kwargs)])
        texts.append(f"{name.removeprefix('aten.').split('.')[0]}({shown})")
    return texts
