"""Norms, linear layers and gated activations."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.compiler.targets.ascend.lowerings.context import Context, matmul
from hybridge.ir.effects import op_name

_SPLITS = ("aten::split", "aten::split_with_sizes", "aten::chunk")


def lower_rms_norm(ctx: Context, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """npu_rms_norm, whose gamma has the activations' dtype."""
    values = x.to(ctx.dtype)
    ctx.became("npu_rms_norm")
    return torch.ops.npu.npu_rms_norm(values, weight.to(ctx.dtype), eps)[0]  # type: ignore[no-any-return]


def lower_linear(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
    """A matrix multiplication in the activations' dtype."""
    ctx.became("MatMulV2")
    return matmul(ctx, x, weight)


def gated(
    ctx: Context, packed: Tensor, activation: str, beta: float, linear_beta: float | None
) -> Tensor:
    """The activation of gate | up, side by side in the last dimension."""
    if activation == "silu":
        return torch.ops.npu.npu_swiglu(packed)  # type: ignore[no-any-return]
    return torch.ops.hybridge_ascend.situ_glu(packed, beta, linear_beta or 0.0)  # type: ignore[no-any-return]


def lower_situ(
    ctx: Context, gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None
) -> Tensor:
    """SituGlu on gate and up side by side: as one product left them, or joined here."""
    ctx.became("SituGlu")
    packed = _halves_of(ctx)
    if packed is None:
        packed = torch.cat([gate.to(ctx.dtype), up.to(ctx.dtype)], -1)
    return gated(ctx, packed.to(ctx.dtype), "situ", beta, linear_beta)


def _halves_of(ctx: Context) -> Tensor | None:
    """The tensor whose last dimension is the gate's columns, then up's, and nothing else."""
    places = [_columns(ctx.argument(name)) for name in ("gate", "up")]
    if None in places:
        return None
    (first, start, middle), (second, begin, stop) = places  # type: ignore[misc]
    width = int(first.meta["val"].shape[-1])
    if first is not second or (start, begin, stop) != (0, middle, width):
        return None
    found: Tensor = ctx.values[first]
    return found


def _columns(node: Node) -> tuple[Node, int, int] | None:
    """(whole, first column, one past the last) that a slice or a part of a split reads."""
    axes = (-1, len(node.meta["val"].shape) - 1)
    args: tuple[Any, ...] = node.args
    if op_name(node) == "aten::slice" and len(args) == 4 and args[1] in axes:
        whole, _, start, stop = args
        return whole, int(start), min(int(stop), int(whole.meta["val"].shape[-1]))
    if node.target is not operator.getitem or op_name(args[0]) not in _SPLITS:
        return None
    split, place = args
    if len(split.args) < 3 or split.args[2] not in axes:
        return None
    widths = [int(part.shape[-1]) for part in split.meta["val"]]
    start = sum(widths[:place])
    return split.args[0], start, start + widths[place]
