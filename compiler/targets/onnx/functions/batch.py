"""How packed tokens map to sequences, and paged positions to cache rows."""

from __future__ import annotations

from dataclasses import dataclass

from hybridge.compiler.targets.onnx.functions.builder import Expression, arange, op


@dataclass(frozen=True)
class TokenRows:
    """Where each packed token belongs.

    Args:
        sequence: [T] int64, its sequence; the last one for padding.
        offset: [T] int64, its place among the new tokens of its sequence.
        valid: [T] bool, false for padding.
    """

    sequence: Expression
    offset: Expression
    valid: Expression


def token_rows(query_start: Expression, tokens: Expression) -> TokenRows:
    """The rows of `tokens` (one element: how many) packed tokens.

    A token's sequence is the number of sequences that end at or before it, which steps over those
    of length zero.
    """
    starts = query_start.int64()
    token = arange(tokens)
    ends = starts.between([1], starts.dim(0))
    ended = (ends.unsqueeze(0) <= token.unsqueeze(1)).int64().sum(1)
    sequence = op.Min(ended, ends.dim(0) - 1)
    return TokenRows(
        sequence=sequence,
        offset=token - starts.take(sequence),
        valid=ended < ends.dim(0),
    )


def cache_rows(cache: Expression, block_table_row: Expression, positions: Expression) -> Expression:
    """The cached rows at `positions` of one sequence.

    Args:
        cache: [blocks, block, 1, D].
        block_table_row: [max_blocks] int64.
        positions: [S] int64, all >= 0.

    Returns:
        [S, D] in fp32. A table entry that no caller may read (a padding token's) is clamped into
        the cache.
    """
    block = cache.dim(1)
    entry = block_table_row.take(positions / block)
    inside = op.Min(op.Max(entry, 0), cache.dim(0) - 1)
    flat = cache.reshape(cache.dim(0) * block, cache.dim(3))
    return flat.take(inside * block + op.Mod(positions, block)).fp32()


def kept_only(keep: Expression, values: Expression) -> Expression:
    """`values` where `keep` [S] holds, else 0 (whatever the row held): values [S, D]."""
    return op.Where(keep.unsqueeze(-1), values, 0.0)


def write_rows(target: Expression, rows: Expression, places: Expression) -> Expression:
    """`target` with row t of `rows` at `places[t]` of axis 0; a negative place writes nothing.

    Args:
        target: [N, ...].
        rows: [T, ...].
        places: [T] int64.
    """
    kept = op.NonZero(places >= 0).squeeze(0)
    indices = places.take(kept).unsqueeze(-1)
    return op.ScatterND(target, indices, rows.take(kept).like(target))
