"""How packed tokens map to sequences: shared by the references of the ops that read a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One sequence's part of a packed batch.

    Args:
        row: the sequence's row in `context_len`, `block_table` and `state_slot`.
        start: its first packed token.
        stop: one past its last packed token.
        context: tokens that were cached before this call.
    """

    row: int
    start: int
    stop: int
    context: int


def spans(query_start: Tensor, context_len: Tensor) -> Iterator[Span]:
    """The sequences of a batch that have tokens, in order."""
    starts = query_start.tolist()
    for row, context in enumerate(context_len.tolist()):
        if starts[row + 1] > starts[row]:
            yield Span(row, starts[row], starts[row + 1], context)


def sequence_rows(cache: Tensor, block_table_row: Tensor, length: int) -> Tensor:
    """The first `length` cached rows of one sequence.

    Args:
        cache: [blocks, block, 1, D].
        block_table_row: [max_blocks], block ids; entries past the length are not read.
        length: how many rows, at most max_blocks * block.

    Returns:
        [length, D].
    """
    block = cache.shape[1]
    blocks = block_table_row[: (length + block - 1) // block].long()
    return cache[blocks].flatten(0, 2)[:length]


def wide(tensor: Tensor) -> Tensor:
    """At least fp32: a reference computes in fp32, or in fp64 when it is given fp64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
