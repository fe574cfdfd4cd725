"""`lightning_indexer`: score, head weighting, causal limit and top-k in one op over the paged key cache."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ops.registry import Constraint, FusedOp, register
from hybridge.ops.sequences import sequence_rows, spans, wide


def reference(
    query: Tensor,
    head_weights: Tensor,
    indexer_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """The positions that each token attends to (spec/MODELS.md 4.4 and 4.5).

    score[t, s] = sum_h head_weights[t, h] * relu(query[t, h] . key[s]) for s <= position(t).

    Args:
        query: [T, H, D].
        head_weights: [T, H] fp32, signed, the scale already in them.
        indexer_cache: [blocks, block, 1, D].
        query_start: [B + 1] prefix sums of the sequences' token counts.
        context_len: [B] tokens cached before this call.
        block_table: [B, max_blocks].
        top_k: how many positions to keep.

    Returns:
        [T, top_k] int32: the positions of the top_k largest scores (ties: lowest position), ascending, a
        dense valid prefix, then -1. A padding token's row is all -1.
    """
    positions = torch.full((query.shape[0], top_k), -1, dtype=torch.int32)
    for span in spans(query_start, context_len):
        length = span.context + span.stop - span.start
        keys = wide(sequence_rows(indexer_cache, block_table[span.row], length))
        own = slice(span.start, span.stop)
        products = torch.einsum("thd,sd->ths", wide(query[own]).to(keys.dtype), keys).relu()
        score = torch.einsum("ths,th->ts", products, wide(head_weights[own]).to(keys.dtype))
        for token in range(span.stop - span.start):
            visible = score[token, : span.context + token + 1]
            order = torch.sort(visible, descending=True, stable=True).indices[:top_k]
            kept = order.sort().values.to(torch.int32)
            positions[span.start + token, : len(kept)] = kept
    return positions


def fake(
    query: Tensor,
    head_weights: Tensor,
    indexer_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    top_k: int,
) -> Tensor:
    return query.new_empty((query.shape[0], top_k), dtype=torch.int32)


LIGHTNING_INDEXER = register(
    FusedOp(
        name="lightning_indexer",
        signature=(
            "(Tensor query, Tensor head_weights, Tensor indexer_cache, Tensor query_start, "
            "Tensor context_len, Tensor block_table, *, int top_k) -> Tensor"
        ),
        reference=reference,
        fake=fake,
        constraints=(
            Constraint(
                "head_weights", "fp32", "bf16 weights change near-tie rankings (MODELS.md 4.5)"
            ),
            Constraint("indexer_cache", "one key head", "MODELS.md 4.4: kI has one head"),
            Constraint(
                "block_table",
                "wide enough for context_len + new tokens",
                "a column that does not exist must never read another block (vllm 53982)",
            ),
        ),
    )
)
