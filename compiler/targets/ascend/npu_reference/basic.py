"""Norms, gated activations and cache writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridge.compiler.targets.ascend.npu_reference.numbers import wide


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * gamma, 1 / rms(x)) over the last dimension.

    Source: torch_npu.npu_rms_norm, op-plugin documentation.
    """
    rstd = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + epsilon)
    return (wide(x) * rstd * wide(gamma)).to(x.dtype), rstd


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(rms_norm(x1 + x2), 1 / rms, x1 + x2). Source: torch_npu.npu_add_rms_norm, op-plugin."""
    total = x1 + x2
    return *rms_norm(total, gamma, epsilon), total


def scatter_nd_update_(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write updates[i] to x[indices[i, 0]], in place; of two writes to one row, one wins.

    Source: torch_npu.npu_scatter_nd_update_, op-plugin documentation.
    """
    rows = indices[..., 0].long()
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= x.shape[0]):
        raise IndexError(f"npu_scatter_nd_update_: rows {rows.tolist()} of {x.shape[0]}")
    x[rows] = updates.to(x.dtype)
    return x


def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str = "PA_NZ",
    **_: Any,
) -> None:
    """Write row t of key [T, H, D] to row slot_mapping[t] of [blocks, block, H, D], value likewise.

    The two may differ in D. Source: hicann/ops-transformer attention/scatter_pa_kv_cache, scene two.
    """
    if cache_mode != "Norm":
        raise NotImplementedError("reference of cache_mode Norm only")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.view(-1, *cache.shape[2:])
        if len(slot_mapping) and not 0 <= int(slot_mapping.min()) <= int(slot_mapping.max()) < len(
            flat
        ):
            raise IndexError(
                f"npu_scatter_pa_kv_cache: slots {slot_mapping.tolist()} of {len(flat)}"
            )
        flat[slot_mapping.long()] = rows.to(cache.dtype)


def situ_glu(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of the two halves of the last dimension, the gate in front.

    linear_beta <= 0 leaves the up half as it is. Source: CANN operator specification SituGlu.
    """
    gate, up = wide(x).chunk(2, -1)
    bounded = linear_beta * torch.tanh(up / linear_beta) if linear_beta > 0 else up
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded).to(x.dtype)


def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half. Source: torch_npu.npu_swiglu."""
    gate, up = wide(x).chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": rms_norm,
    "npu::npu_add_rms_norm": add_rms_norm,
    "npu::npu_scatter_nd_update_": scatter_nd_update_,
    "npu::npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu::npu_swiglu": swiglu,
    "hybridge_ascend::situ_glu": situ_glu,
}
