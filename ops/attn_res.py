"""`attn_res_prepare` and `attn_res_update`: Attention Residuals in two stages (spec/MODELS.md 6.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ops.registry import Constraint, FusedOp, register
from hybridge.ops.sequences import wide


def _scores(values: Tensor, queries: Tensor, eps: float) -> Tensor:
    """values [..., D], queries [S, D] -> [S, ...]: the queries against the RMS-normalised values."""
    statistic = torch.rsqrt(values.square().mean(-1) + eps)
    return torch.einsum("...d,sd->s...", values, queries) * statistic


def prepare_reference(
    sources: Tensor, queries: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage one: the frozen sources of a block, for all query sites of that block.

    Args:
        sources: [n, T, D], n >= 1. queries: [S, D], each norm_weight * proj_weight of a site.
        eps: of the keys' RMS norm.

    Returns:
        numerator [S, T, D], logit_max [S, T], exp_sum [S, T], all fp32:
        sum_i exp(s_i - max) v_i, max_i s_i, sum_i exp(s_i - max).
    """
    values = wide(sources)
    scores = _scores(values, wide(queries), eps)
    logit_max = scores.amax(dim=1)
    weights = (scores - logit_max.unsqueeze(1)).exp()
    return torch.einsum("snt,ntd->std", weights, values), logit_max, weights.sum(dim=1)


def prepare_fake(sources: Tensor, queries: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    sites, tokens = queries.shape[0], sources.shape[1]
    dtype = torch.promote_types(sources.dtype, torch.float32)
    statistics = sources.new_empty((sites, tokens), dtype=dtype)
    numerator = sources.new_empty((sites, tokens, sources.shape[2]), dtype=dtype)
    return numerator, statistics, torch.empty_like(statistics)


def update_reference(
    prefix: Tensor,
    query: Tensor,
    numerator: Tensor,
    logit_max: Tensor,
    exp_sum: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Stage two: merge the live prefix into a site's statistics by online softmax.

    Args:
        prefix: [T, D]. query: [D]. numerator: [T, D], logit_max: [T], exp_sum: [T] of `attn_res_prepare`.
        eps: of the key's RMS norm.

    Returns:
        [T, D] in prefix's dtype.
    """
    value = wide(prefix)
    score = _scores(value, wide(query).unsqueeze(0), eps)[0]
    merged = torch.maximum(score, logit_max)
    frozen, live = (logit_max - merged).exp(), (score - merged).exp()
    total = exp_sum * frozen + live
    mixed = numerator * (frozen / total).unsqueeze(-1) + value * (live / total).unsqueeze(-1)
    return mixed.to(prefix.dtype)


def update_fake(prefix: Tensor, *_rest: Tensor, eps: float) -> Tensor:
    return torch.empty_like(prefix)


ATTN_RES_PREPARE = register(
    FusedOp(
        name="attn_res_prepare",
        signature="(Tensor sources, Tensor queries, *, float eps) -> (Tensor, Tensor, Tensor)",
        reference=prepare_reference,
        fake=prepare_fake,
        constraints=(
            Constraint("sources", "at least one", "an empty softmax has no value (ASCEND.md A.3)"),
        ),
    )
)

ATTN_RES_UPDATE = register(
    FusedOp(
        name="attn_res_update",
        signature=(
            "(Tensor prefix, Tensor query, Tensor numerator, Tensor logit_max, Tensor exp_sum, *, "
            "float eps) -> Tensor"
        ),
        reference=update_reference,
        fake=update_fake,
    )
)
