"""The index tensors of one call of a graph, from what each sequence brings to it.

Tokens of all sequences are packed one after the other; see the graph signature in the design notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.errors import RunError

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Row:
    """One sequence's part in a call.

    Attributes:
        tokens: the new tokens.
        context: tokens that are cached already.
        blocks: the sequence's cache blocks, in order.
        slot: its state slot.
    """

    tokens: Sequence[int]
    context: int
    blocks: Sequence[int] | Indices
    slot: int

    def blocks_used(self, block_size: int) -> int:
        """How many of the blocks hold tokens once the new ones are written."""
        return -(-(self.context + len(self.tokens)) // block_size)


def build_batch(
    rows: Sequence[Row],
    block_size: int,
    *,
    logits_index: Sequence[int] | None = None,
    pad_tokens: int = 0,
    pad_rows: int = 0,
) -> dict[str, Indices]:
    """The index inputs of a call, by name.

    Args:
        rows: the sequences, in row order.
        block_size: tokens in a cache block.
        logits_index: packed token numbers whose logits are wanted; default, each row's last.
        pad_tokens: tokens to add at the end, that belong to no sequence and are written nowhere.
        pad_rows: rows to add, of length 0 and with no slot.

    Raises:
        RunError: a sequence's blocks do not hold its tokens (never write into another's block).
    """
    lengths = [len(row.tokens) for row in rows] + [0] * pad_rows
    query_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = [token for row in rows for token in row.tokens] + [0] * pad_tokens
    mapping = np.full(len(tokens), -1, np.int32)
    for index, row in enumerate(rows):
        start = query_start[index]
        mapping[start : start + len(row.tokens)] = _cache_rows(row, block_size)
    if logits_index is None:
        logits_index = [int(end) - 1 for end in query_start[1 : len(rows) + 1]]
    return {
        "token_ids": np.array(tokens, np.int32),
        "query_start": query_start,
        "context_len": np.array([row.context for row in rows] + [0] * pad_rows, np.int32),
        "slot_mapping": mapping,
        "block_table": _block_table(rows, block_size, pad_rows),
        "state_slot": np.array([row.slot for row in rows] + [-1] * pad_rows, np.int32),
        "logits_index": np.array(logits_index, np.int32),
    }


def _cache_rows(row: Row, block_size: int) -> Indices:
    """The cache row of each new token: block * block_size + offset."""
    positions = np.arange(row.context, row.context + len(row.tokens))
    columns = positions // block_size
    if row.blocks_used(block_size) > len(row.blocks):
        raise RunError(
            f"position {row.context + len(row.tokens) - 1} lies in block "
            f"{row.blocks_used(block_size) - 1} of a sequence that holds "
            f"{len(row.blocks)} blocks of {block_size}",
            "reserve the blocks before the tokens are run",
        )
    blocks = np.asarray(row.blocks, np.int64)[columns]
    return (blocks * block_size + positions % block_size).astype(np.int32)


def _block_table(rows: Sequence[Row], block_size: int, pad_rows: int) -> Indices:
    """[B, M] of the blocks in use; M a power of two, so that few shapes occur.

    What is beyond a sequence's own blocks points to block 0 and is not read.
    """
    used = [row.blocks_used(block_size) for row in rows]
    width = 1 << max(max(used, default=1) - 1, 0).bit_length()
    table = np.zeros((len(rows) + pad_rows, width), np.int32)
    for index, (row, count) in enumerate(zip(rows, used, strict=True)):
        table[index, :count] = row.blocks[:count]
    return table
