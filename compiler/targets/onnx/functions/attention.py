"""Bodies of `lightning_indexer`, `sparse_flash_attention` and `mla_attention`.

Each walks the tokens: memory stays at one token's rows, where the whole batch at once would need
tokens × context.
"""

from __future__ import annotations

from hybridge.compiler.targets.onnx.functions.batch import (
    cache_rows,
    kept_only,
    token_rows,
)
from hybridge.compiler.targets.onnx.functions.builder import (
    FLOAT,
    INT64,
    Expression,
    arange,
    computed,
    concat,
    many,
    op,
    scan,
)

# Below any score, and finite: a row with no position at all must not become 0 / 0.
_MASKED = -3.0e38

Stepped = tuple[list[Expression], list[Expression]]


def lightning_indexer(
    query: Expression,
    head_weights: Expression,
    indexer_cache: Expression,
    query_start: Expression,
    context_len: Expression,
    block_table: Expression,
    *,
    top_k: Expression,
) -> tuple[Expression, ...]:
    """The body of `lightning_indexer`: arguments and results as its reference."""
    rows = token_rows(query_start, query.dim(0))
    visible = context_len.int64().take(rows.sequence) + rows.offset + 1
    tables = block_table.int64().take(rows.sequence)
    width = top_k.unsqueeze(0)

    def token(q: Expression, weights: Expression, table: Expression, count: Expression) -> Stepped:
        keys = cache_rows(indexer_cache, table, arange(count))
        products = op.Relu(q @ keys.transpose(1, 0))
        score = (weights.unsqueeze(0) @ products).squeeze(0)
        # TopK gives the lowest index first among equal scores (tested against the reference).
        _, best = many("TopK", 2, score, op.Min(width, score.dim(0)))
        ascending, _ = many("TopK", 2, best, best.dim(0), largest=0)
        tail = concat(0, width - ascending.dim(0))
        return [], [op.Pad(ascending, tail, -1)]

    # A padding token looks at one row, so that no step is empty; its result is dropped.
    scanned = [query.fp32(), head_weights.fp32(), tables, _at_least_one(visible, rows.valid)]
    (positions,) = scan(token, [], scanned, [(INT64, 1)])
    return (op.Where(rows.valid.unsqueeze(-1), positions, -1).int32(),)


def sparse_flash_attention(
    query: Expression,
    latent_cache: Expression,
    positions: Expression,
    query_start: Expression,
    context_len: Expression,
    block_table: Expression,
    *,
    scale: Expression,
    value_dim: Expression,
) -> tuple[Expression, ...]:
    """The body of `sparse_flash_attention`: arguments and results as its reference."""
    rows = token_rows(query_start, query.dim(0))
    tables = block_table.int64().take(rows.sequence)
    wanted = op.Where(rows.valid.unsqueeze(-1), positions.int64(), -1)

    def token(q: Expression, table: Expression, chosen: Expression) -> Stepped:
        keep = chosen >= 0
        found = cache_rows(latent_cache, table, op.Max(chosen, 0))
        return [], [_attend(q, found, keep, scale, value_dim)]

    (output,) = scan(token, [], [query.fp32(), tables, wanted], [(FLOAT, 2)])
    return (computed(output).like(query),)


def mla_attention(
    query: Expression,
    latent_cache: Expression,
    query_start: Expression,
    context_len: Expression,
    block_table: Expression,
    *,
    scale: Expression,
    value_dim: Expression,
) -> tuple[Expression, ...]:
    """The body of `mla_attention`: arguments and results as its reference."""
    rows = token_rows(query_start, query.dim(0))
    visible = context_len.int64().take(rows.sequence) + rows.offset + 1
    tables = block_table.int64().take(rows.sequence)

    def token(q: Expression, table: Expression, count: Expression, valid: Expression) -> Stepped:
        found = cache_rows(latent_cache, table, arange(count))
        keep = op.Expand(valid, found.dim(0))
        return [], [_attend(q, found, keep, scale, value_dim)]

    scanned = [query.fp32(), tables, _at_least_one(visible, rows.valid), rows.valid]
    (output,) = scan(token, [], scanned, [(FLOAT, 2)])
    return (computed(output).like(query),)


def _at_least_one(visible: Expression, valid: Expression) -> Expression:
    return op.Where(valid, visible, 1)


def _attend(
    query: Expression,
    found: Expression,
    keep: Expression,
    scale: Expression,
    value_dim: Expression,
) -> Expression:
    """Query [H, D] against the rows of `found` [S, D] that `keep` [S] marks -> [H, value_dim]."""
    memory = kept_only(keep, found)
    scores = op.Where(keep.unsqueeze(0), (query @ memory.transpose(1, 0)) * scale, _MASKED)
    weights = op.Where(keep.unsqueeze(0), op.Softmax(scores, axis=-1), 0.0)
    return weights @ memory.between([0], value_dim.unsqueeze(0), axis=1)
