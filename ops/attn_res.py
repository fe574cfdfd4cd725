"""Attention Residuals in two stages (spec/MODELS.md 6.3): `attn_res_prepare`, then an update at every site.

Stage two is `attn_res_update` alone, `attn_res_update_norm` with the RMS norm that follows it, or
`attn_res_add_update_norm` with the residual add that precedes it as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ops.elementwise import rms_norm_reference
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
    site: int,
    eps: float,
) -> Tensor:
    """Stage two: merge the live prefix into a site's statistics by online softmax.

    Args:
        prefix: [T, D]. query: [D].
        numerator: [S, T, D], logit_max: [S, T], exp_sum: [S, T] of `attn_res_prepare`.
        site: which of the S sites this is. eps: of the key's RMS norm.

    Returns:
        [T, D] in prefix's dtype.
    """
    value, top = wide(prefix), logit_max[site]
    score = _scores(value, wide(query).unsqueeze(0), eps)[0]
    merged = torch.maximum(score, top)
    frozen, live = (top - merged).exp(), (score - merged).exp()
    total = exp_sum[site] * frozen + live
    mixed = numerator[site] * (frozen / total).unsqueeze(-1) + value * (live / total).unsqueeze(-1)
    return mixed.to(prefix.dtype)


def update_fake(prefix: Tensor, *_rest: Tensor, site: int, eps: float) -> Tensor:
    return torch.empty_like(prefix)


def update_norm_reference(
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
    """`rms_norm(attn_res_update(...), norm_weight)`.

    Args:
        prefix, query, numerator, logit_max, exp_sum, site, eps: as for `attn_res_update`.
        norm_weight: [D]. norm_eps: of the norm of the mix.

    Returns:
        [T, D] in prefix's dtype.
    """
    mixed = update_reference(prefix, query, numerator, logit_max, exp_sum, site=site, eps=eps)
    return rms_norm_reference(mixed, norm_weight, eps=norm_eps)


def update_norm_fake(
    prefix: Tensor, *_rest: Tensor, site: int, eps: float, norm_eps: float
) -> Tensor:
    return torch.empty_like(prefix)


def add_update_norm_reference(
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
    """The next prefix, and `attn_res_update_norm` of it.

    Args:
        delta: [T, D], what the last sublayer adds to the prefix, in its dtype.
        prefix, query, numerator, logit_max, exp_sum, norm_weight, site, eps, norm_eps: as there.

    Returns:
        prefix + delta and its normed mix, [T, D] in prefix's dtype.
    """
    total = prefix + delta
    statistics = (numerator, logit_max, exp_sum)
    normed = update_norm_reference(
        total, query, *statistics, norm_weight, site=site, eps=eps, norm_eps=norm_eps
    )
    return total, normed


def add_update_norm_fake(
    prefix: Tensor, *_rest: Tensor, site: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(prefix), torch.empty_like(prefix)


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

_SITE = Constraint("site", "less than the sites of the statistics", "each site has its own")
_STATISTICS = "Tensor query, Tensor numerator, Tensor logit_max, Tensor exp_sum"

ATTN_RES_UPDATE = register(
    FusedOp(
        name="attn_res_update",
        signature=f"(Tensor prefix, {_STATISTICS}, *, int site, float eps) -> Tensor",
        reference=update_reference,
        fake=update_fake,
        constraints=(_SITE,),
    )
)

ATTN_RES_UPDATE_NORM = register(
    FusedOp(
        name="attn_res_update_norm",
        signature=(
            f"(Tensor prefix, {_STATISTICS}, Tensor norm_weight, *, int site, float eps, "
            "float norm_eps) -> Tensor"
        ),
        reference=update_norm_reference,
        fake=update_norm_fake,
        constraints=(_SITE,),
    )
)

ATTN_RES_ADD_UPDATE_NORM = register(
    FusedOp(
        name="attn_res_add_update_norm",
        signature=(
            f"(Tensor prefix, Tensor delta, {_STATISTICS}, Tensor norm_weight, *, int site, "
            "float eps, float norm_eps) -> (Tensor, Tensor)"
        ),
        reference=add_update_norm_reference,
        fake=add_update_norm_fake,
        constraints=(_SITE,),
    )
)
