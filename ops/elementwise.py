"""`rms_norm`, `situ` and `linear`: the small ops that targets run whole."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ops.registry import FusedOp, register
from hybridge.ops.sequences import wide


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in fp32; the result has x's dtype.

    Args:
        x: [..., D]. weight: [D].
    """
    values = wide(x)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normed * wide(weight)).to(x.dtype)


def rms_norm_fake(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return torch.empty_like(x)


def situ_reference(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta), in fp32 (spec/MODELS.md 8.3).

    Args:
        gate, up: the same shape. linear_beta: None leaves `up` as it is.
    """
    g, u = wide(gate), wide(up)
    bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded).to(gate.dtype)


def situ_fake(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    return torch.empty_like(gate)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] transposed -> [..., N] in x's dtype, accumulated in fp32.

    The weight may be narrower than x (bf16): it is used as stored.
    """
    return (wide(x) @ weight.to(wide(x).dtype).T).to(x.dtype)


def linear_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


RMS_NORM = register(
    FusedOp(
        name="rms_norm",
        signature="(Tensor x, Tensor weight, *, float eps) -> Tensor",
        reference=rms_norm_reference,
        fake=rms_norm_fake,
    )
)

SITU = register(
    FusedOp(
        name="situ",
        signature="(Tensor gate, Tensor up, *, float beta, float? linear_beta) -> Tensor",
        reference=situ_reference,
        fake=situ_fake,
    )
)

LINEAR = register(
    FusedOp(
        name="linear",
        signature="(Tensor x, Tensor weight) -> Tensor",
        reference=linear_reference,
        fake=linear_fake,
    )
)
