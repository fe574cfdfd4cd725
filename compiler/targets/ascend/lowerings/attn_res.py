"""Attention Residuals: fused on 950, spelled out elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.lowerings.context import Context
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
    eps: float,
) -> Tensor:
    """BlockAttnResUpdate on 950, taking the prefix as what is added to an empty partial sum."""
    if ctx.soc == ASCEND_950:
        ctx.require("BlockAttnResUpdate", hidden_size=prefix.shape[-1])
        ctx.became("BlockAttnResUpdate")
        partial = prefix.float().clone()  # the operator writes to it
        nothing = ctx.once(
            ("nothing", prefix.shape), lambda: torch.zeros_like(prefix, dtype=ctx.dtype)
        )
        return torch.ops.hybridge_ascend.block_attn_res_update(  # type: ignore[no-any-return]
            partial, nothing, query.float(), numerator, logit_max, exp_sum, eps
        )[1]
    ctx.became("reductions")
    value = prefix.float()
    rms = torch.rsqrt((value * value).mean(-1) + eps)
    score = (value * query.float()).sum(-1) * rms
    top = torch.maximum(logit_max, score)
    frozen, live = (logit_max - top).exp(), (score - top).exp()
    total = exp_sum * frozen + live
    mix = numerator * (frozen / total).unsqueeze(-1) + value * (live / total).unsqueeze(-1)
    return mix.to(ctx.dtype)
