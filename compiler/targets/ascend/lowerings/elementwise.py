"""Norms, linear layers and gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.lowerings.context import Context, matmul


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
    """SituGlu on gate and up side by side."""
    ctx.became("SituGlu")
    packed = torch.cat([gate.to(ctx.dtype), up.to(ctx.dtype)], -1)
    return gated(ctx, packed, "situ", beta, linear_beta)
