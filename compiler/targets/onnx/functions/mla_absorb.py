"""Bodies of `mla_absorb_query` and `mla_expand_value`."""

from __future__ import annotations

from hybridge.compiler.targets.onnx.functions.builder import Expression, computed, op


def mla_absorb_query(query: Expression, kv_b_weight: Expression) -> tuple[Expression, ...]:
    """The body of `mla_absorb_query`: arguments and results as its reference."""
    key_up = _by_head(query, kv_b_weight).between([0], query.dim(2), axis=1)
    absorbed = query.fp32().transpose(1, 0, 2) @ key_up
    return (computed(absorbed.transpose(1, 0, 2)).like(query),)


def mla_expand_value(
    latent: Expression, kv_b_weight: Expression, *, value_dim: Expression
) -> tuple[Expression, ...]:
    """The body of `mla_expand_value`: arguments and results as its reference."""
    by_head = _by_head(latent, kv_b_weight)
    rows = by_head.dim(1)
    value_up = by_head.between(rows - op.Reshape(value_dim, [1]), rows, axis=1)
    values = latent.fp32().transpose(1, 0, 2) @ value_up.transpose(0, 2, 1)
    return (computed(values.transpose(1, 0, 2)).like(latent),)


def _by_head(x: Expression, kv_b_weight: Expression) -> Expression:
    """[H, nope + value, C] in fp32."""
    return kv_b_weight.fp32().reshape(x.dim(1), -1, kv_b_weight.dim(1))
