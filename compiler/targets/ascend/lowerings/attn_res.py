"""Attention Residuals: fused on 950, spelled out elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.lowerings.context import Context
from hybridge.compiler.targets.ascend.lowerings.elementwise import lower_rms_norm
from hybridge.compiler.targets.ascend.own_operators import ASCEND_950


def lower_attn_res_prepare(
    ctx: Context, sources: Tensor, queries: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """BlockAttnResPrepare on 950; elsewhere its maths."""
    blocks = sources.transpose(0, 1).float()
    if ctx.soc == ASCEND_950:
        ctx.require("BlockAttnResPrepare", blocks=blocks.shape[1], hidden_size=blocks.shape[2])
        ctx.became("BlockAttnResPrepare")
        count = ctx.once(("blocks", blocks.shape[1]), lambda: _count(blocks))
        return torch.ops.hybridge_ascend.block_attn_res_prepare(  # type: ignore[no-any-return]
            blocks.contiguous(), count, queries.float(), eps
        )
    ctx.became("matmuls and reductions")
    keys = blocks * torch.rsqrt((blocks * blocks).mean(-1, keepdim=True) + eps)
    logits = torch.matmul(keys, queries.float().t()).permute(2, 0, 1)
    top = logits.max(-1).values  # torchair cannot convert amax
    weights = (logits - top.unsqueeze(-1)).exp()
    numerator = torch.matmul(weights.permute(1, 0, 2), blocks).permute(1, 0, 2)
    return numerator, top, weights.sum(-1)


def _count(blocks: Tensor) -> Tensor:
    return torch.full((1,), blocks.shape[1], dtype=torch.int64, device=blocks.device)


def lower_attn_res_update(
    ctx: Context,
    prefix: Tensor,
    query: Tensor,
    numerator: Tensor,
    logit_max: Tensor,
    exp_sum: Tensor,
    *,
    site: int,
    eps: float,
) -> Tensor:
    """BlockAttnResUpdate on 950, taking the prefix as what is added to an empty partial sum."""
    statistics = numerator[site], logit_max[site], exp_sum[site]
    if ctx.soc == ASCEND_950:
        nothing = ctx.once(
            ("nothing", str(prefix.shape)), lambda: torch.zeros_like(prefix, dtype=ctx.dtype)
        )
        return _update(ctx, prefix, nothing, query, statistics, eps)[1]
    ctx.became("reductions")
    return _mix(prefix.float(), query.float(), statistics, eps).to(ctx.dtype)


def lower_attn_res_update_norm(
    ctx: Context,
    prefix: Tensor,
    query: Tensor,
    numerator: Tensor,
    logit_max: Tensor,
    exp_sum: Tensor,
    norm_weight: Tensor,
    *,
    site: int,
    eps: float,
    norm_eps: float,
) -> Tensor:
    """`attn_res_update`, then npu_rms_norm: no GE operator does both (see docs/ascend.md)."""
    h = lower_attn_res_update(ctx, prefix, query, numerator, logit_max, exp_sum, site=site, eps=eps)
    return lower_rms_norm(ctx, h, norm_weight, eps=norm_eps)


def lower_attn_res_add_update_norm(
    ctx: Context,
    prefix: Tensor,
    delta: Tensor,
    query: Tensor,
    numerator: Tensor,
    logit_max: Tensor,
    exp_sum: Tensor,
    norm_weight: Tensor,
    *,
    site: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """BlockAttnResUpdate with its delta on 950, then npu_rms_norm; the sum stays in fp32."""
    statistics = numerator[site], logit_max[site], exp_sum[site]
    if ctx.soc == ASCEND_950:
        total, h = _update(ctx, prefix, delta.to(ctx.dtype), query, statistics, eps)
    else:
        ctx.became("an add and reductions")
        total = prefix.float() + delta.float()
        h = _mix(total, query.float(), statistics, eps).to(ctx.dtype)
    return total, lower_rms_norm(ctx, h, norm_weight, eps=norm_eps)


def _update(
    ctx: Context,
    prefix: Tensor,
    delta: Tensor,
    query: Tensor,
    statistics: tuple[Tensor, Tensor, Tensor],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """BlockAttnResUpdate: (prefix + delta in fp32, the mix in delta's dtype)."""
    ctx.require("BlockAttnResUpdate", hidden_size=prefix.shape[-1])
    ctx.became("BlockAttnResUpdate")
    # The operator writes to its partial sum: a value that others read, or will read, is copied first.
    own = prefix.dtype != torch.float32 or ctx.is_only_reader("prefix")
    partial = prefix.float() if own else prefix.clone()
    return torch.ops.hybridge_ascend.block_attn_res_update(  # type: ignore[no-any-return]
        partial, delta, query.float(), *statistics, eps
    )


def _mix(
    value: Tensor, query: Tensor, statistics: tuple[Tensor, Tensor, Tensor], eps: float
) -> Tensor:
    """The fp32 maths of stage two."""
    numerator, logit_max, exp_sum = statistics
    rms = torch.rsqrt((value * value).mean(-1) + eps)
    score = (value * query).sum(-1) * rms
    top = torch.maximum(logit_max, score)
    frozen, live = (logit_max - top).exp(), (score - top).exp()
    total = exp_sum * frozen + live
    return numerator * (frozen / total).unsqueeze(-1) + value * (live / total).unsqueeze(-1)
