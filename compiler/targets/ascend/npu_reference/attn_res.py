"""Attention Residuals in two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.npu_reference.numbers import wide


def block_attn_res_prepare(
    block_res: Tensor, valid_blocks: Tensor, pseudo_query: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax statistics of S queries over the first valid_blocks of [T, N, D] frozen blocks.

    (numerator [S, T, D], logit_max [S, T], exp_sum [S, T]). Source: hicann/ops-transformer
    attention/block_attn_res_prepare/README.md.
    """
    blocks = wide(block_res)[:, : int(valid_blocks[0])]
    keys = blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + eps)
    logits = torch.einsum("sd,tnd->stn", wide(pseudo_query), keys)
    top = logits.amax(-1)
    weights = (logits - top[..., None]).exp()
    return torch.einsum("stn,tnd->std", weights, blocks), top, weights.sum(-1)


def block_attn_res_update(
    partial_block: Tensor,
    delta: Tensor,
    pseudo_query: Tensor,
    numerator: Tensor,
    logit_max: Tensor,
    exp_sum: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(partial + delta, the mix of it with the frozen statistics), the second in delta's dtype.

    The sum is written to partial_block, as the operator does, so that a lowering that lends it a tensor which others
    read gives wrong results here too.

    Source: hicann/ops-transformer attention/block_attn_res_update/README.md.
    """
    merged = wide(partial_block) + wide(delta)
    rms = torch.sqrt(merged.square().mean(-1) + eps)
    score = (merged * wide(pseudo_query)).sum(-1) / rms
    top = torch.maximum(logit_max, score)
    frozen, live = (logit_max - top).exp(), (score - top).exp()
    total = exp_sum * frozen + live
    mix = numerator * (frozen / total)[:, None] + merged * (live / total)[:, None]
    return partial_block.copy_(merged), mix.to(delta.dtype)


REFERENCES: dict[str, Callable[..., Any]] = {
    "hybridge_ascend::block_attn_res_prepare": block_attn_res_prepare,
    "hybridge_ascend::block_attn_res_update": block_attn_res_update,
}
