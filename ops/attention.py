"""`sparse_flash_attention` and `mla_attention`: absorbed MLA over paged latent rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ops.registry import Constraint, FusedOp, register
from hybridge.ops.sequences import sequence_rows, spans, wide


def _attend(query: Tensor, rows: Tensor, scale: float, value_dim: int) -> Tensor:
    """query [H, D] against rows [S, D], S >= 1 -> [H, value_dim] (spec/MODELS.md 4.2, absorbed)."""
    rows = rows.to(query.dtype)
    weights = torch.softmax(scale * (query @ rows.T), dim=-1)
    return weights @ rows[:, :value_dim]


def sparse_reference(
    query: Tensor,
    latent_cache: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Attention over the selected rows only (spec/MODELS.md 4.6).

    Args:
        query: [T, H, latent + rope], the absorbed query.
        latent_cache: [blocks, block, 1, latent + rope].
        positions: [T, k] integer, positions in the token's own sequence; -1 is ignored.
        query_start: [B + 1]. context_len: [B]. block_table: [B, max_blocks].
        scale: multiplies the scores before softmax.
        value_dim: the first value_dim columns of a row are its value.

    Returns:
        [T, H, value_dim] in the query's dtype; zeros for a token with no position.
    """
    output = query.new_zeros((*query.shape[:2], value_dim))
    for span in spans(query_start, context_len):
        length = span.context + span.stop - span.start
        rows = sequence_rows(latent_cache, block_table[span.row], length)
        for token in range(span.start, span.stop):
            chosen = positions[token][positions[token] >= 0].long()
            if len(chosen):
                result = _attend(wide(query[token]), rows[chosen], scale, value_dim)
                output[token] = result.to(output.dtype)
    return output


def sparse_fake(
    query: Tensor,
    latent_cache: Tensor,
    positions: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value_dim))


def dense_reference(
    query: Tensor,
    latent_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Causal attention over all rows of the token's sequence (spec/MODELS.md 4.2, absorbed).

    Arguments and result as `sparse_flash_attention`, without positions; padding tokens give zeros.
    """
    output = query.new_zeros((*query.shape[:2], value_dim))
    for span in spans(query_start, context_len):
        length = span.context + span.stop - span.start
        rows = sequence_rows(latent_cache, block_table[span.row], length)
        for token in range(span.stop - span.start):
            seen = rows[: span.context + token + 1]
            result = _attend(wide(query[span.start + token]), seen, scale, value_dim)
            output[span.start + token] = result.to(output.dtype)
    return output


def dense_fake(
    query: Tensor,
    latent_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value_dim))


_ONE_HEAD = Constraint("latent_cache", "one latent head", "absorbed MLA is MQA (MODELS.md 4.2)")

SPARSE_FLASH_ATTENTION = register(
    FusedOp(
        name="sparse_flash_attention",
        signature=(
            "(Tensor query, Tensor latent_cache, Tensor positions, Tensor query_start, "
            "Tensor context_len, Tensor block_table, *, float scale, int value_dim) -> Tensor"
        ),
        reference=sparse_reference,
        fake=sparse_fake,
        constraints=(
            _ONE_HEAD,
            Constraint(
                "positions",
                "a dense valid prefix, then -1",
                "an interior -1 truncates the row on Ascend (ASCEND.md A.1)",
            ),
        ),
    )
)

MLA_ATTENTION = register(
    FusedOp(
        name="mla_attention",
        signature=(
            "(Tensor query, Tensor latent_cache, Tensor query_start, Tensor context_len, "
            "Tensor block_table, *, float scale, int value_dim) -> Tensor"
        ),
        reference=dense_reference,
        fake=dense_fake,
        constraints=(_ONE_HEAD,),
    )
)
