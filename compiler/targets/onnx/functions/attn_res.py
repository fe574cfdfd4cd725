"""Bodies of `attn_res_prepare` and of the ops of stage two."""

from __future__ import annotations

from hybridge.compiler.targets.onnx.functions.builder import Expression, computed, op
from hybridge.compiler.targets.onnx.functions.elementwise import rms_norm


def attn_res_prepare(
    sources: Expression, queries: Expression, *, eps: Expression
) -> tuple[Expression, ...]:
    """The body of `attn_res_prepare`: arguments and results as its reference."""
    values = sources.fp32()
    # [n, T, S]: every source against every site.
    raw = values @ queries.fp32().transpose(1, 0)
    scores = (raw / op.Sqrt((values * values).mean(-1) + eps)).transpose(2, 0, 1)
    logit_max = op.ReduceMax(scores, [1], keepdims=1)
    weights = op.Exp(scores - logit_max)
    by_token = weights.transpose(2, 0, 1) @ values.transpose(1, 0, 2)
    return by_token.transpose(1, 0, 2), logit_max.squeeze(1), weights.sum(1)


def attn_res_update(
    prefix: Expression,
    query: Expression,
    numerator: Expression,
    logit_max: Expression,
    exp_sum: Expression,
    *,
    site: Expression,
    eps: Expression,
) -> tuple[Expression, ...]:
    """The body of `attn_res_update`: arguments and results as its reference."""
    value, top = prefix.fp32(), logit_max.take(site)
    score = (value * query.fp32()).sum(-1) / op.Sqrt((value * value).mean(-1) + eps).squeeze(-1)
    merged = op.Max(score, top)
    frozen, live = op.Exp(top - merged), op.Exp(score - merged)
    total = exp_sum.take(site) * frozen + live
    kept = numerator.take(site) * (frozen / total).unsqueeze(-1)
    return (computed(kept + value * (live / total).unsqueeze(-1)).like(prefix),)


def attn_res_update_norm(
    prefix: Expression,
    query: Expression,
    numerator: Expression,
    logit_max: Expression,
    exp_sum: Expression,
    norm_weight: Expression,
    *,
    site: Expression,
    eps: Expression,
    norm_eps: Expression,
) -> tuple[Expression, ...]:
    """The body of `attn_res_update_norm`: arguments and results as its reference."""
    (mixed,) = attn_res_update(prefix, query, numerator, logit_max, exp_sum, site=site, eps=eps)
    return rms_norm(mixed, norm_weight, eps=norm_eps)


def attn_res_add_update_norm(
    prefix: Expression,
    delta: Expression,
    query: Expression,
    numerator: Expression,
    logit_max: Expression,
    exp_sum: Expression,
    norm_weight: Expression,
    *,
    site: Expression,
    eps: Expression,
    norm_eps: Expression,
) -> tuple[Expression, ...]:
    """The body of `attn_res_add_update_norm`: arguments and results as its reference."""
    total = computed(prefix.fp32() + delta.fp32()).like(prefix)
    statistics = (numerator, logit_max, exp_sum)
    normed = attn_res_update_norm(
        total, query, *statistics, norm_weight, site=site, eps=eps, norm_eps=norm_eps
    )
    return total, *normed
