"""Bodies of `attn_res_prepare` and `attn_res_update`."""

from __future__ import annotations

from hybridge.compiler.targets.onnx.functions.builder import Expression, computed, op


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
    eps: Expression,
) -> tuple[Expression, ...]:
    """The body of `attn_res_update`: arguments and results as its reference."""
    value = prefix.fp32()
    score = (value * query.fp32()).sum(-1) / op.Sqrt((value * value).mean(-1) + eps).squeeze(-1)
    merged = op.Max(score, logit_max)
    frozen, live = op.Exp(logit_max - merged), op.Exp(score - merged)
    total = exp_sum * frozen + live
    mixed = numerator * (frozen / total).unsqueeze(-1) + value * (live / total).unsqueeze(-1)
    return (computed(mixed).like(prefix),)
