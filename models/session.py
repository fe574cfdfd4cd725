"""Run the eager model over sequences: the reference that artifacts and graphs are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridge.models.batch import Phase
from hybridge.models.caches import allocate_caches
from hybridge.models.model import HybridModel


class EagerSession:
    """Rows of sequences with their own paged caches and state slots.

    Blocks and slots are dealt out of order, so that nothing works by accident of position.

    Args:
        model: the eager model, weights loaded; its dtype is the caches' too.
        rows: how many sequences. max_context: tokens a sequence may reach.
        block_size: rows in a cache block.
    """

    def __init__(
        self, model: HybridModel, *, rows: int = 1, max_context: int, block_size: int = 16
    ) -> None:
        self.model, self.rows, self.block_size = model, rows, block_size
        columns = -(-max_context // block_size)
        self.lengths = [0] * rows
        blocks = rows * columns + 1
        order = torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.block_table = order.view(columns, rows).T.contiguous().to(torch.int32)
        self.state_slot = torch.arange(rows, 0, -1, dtype=torch.int32)
        dtype = model.model.norm.weight.dtype
        self.caches = allocate_caches(model.config, blocks, block_size, rows + 1, dtype)

    def batch(self, new_tokens: Sequence[Tensor], padding: int = 0) -> dict[str, Tensor]:
        """The graph inputs that append `new_tokens[row]` to each row, `padding` tokens at the end."""
        counts = [len(tokens) for tokens in new_tokens]
        starts = torch.tensor([0, *counts]).cumsum(0)
        slots = [self._slots(row, count) for row, count in enumerate(counts)]
        slots.append(torch.full((padding,), -1))
        ids = torch.cat([*new_tokens, torch.zeros(padding, dtype=torch.int32)])
        return {
            "token_ids": ids.to(torch.int32),
            "query_start": starts.to(torch.int32),
            "context_len": torch.tensor(self.lengths, dtype=torch.int32),
            "slot_mapping": torch.cat(slots).to(torch.int32),
            "block_table": self.block_table,
            "state_slot": self.state_slot,
            "logits_index": torch.arange(sum(counts), dtype=torch.int32),
        }

    def advance(self, new_tokens: Sequence[Tensor]) -> None:
        """Count `new_tokens` as cached."""
        self.lengths = [
            length + len(tokens) for length, tokens in zip(self.lengths, new_tokens, strict=True)
        ]

    @torch.no_grad()
    def step(
        self, new_tokens: Sequence[Tensor], phase: Phase = "prefill", padding: int = 0
    ) -> Tensor:
        """Append tokens to each row (decode: exactly one) and return their logits, [sum, vocab]."""
        batch = self.batch(new_tokens, padding)
        logits: Tensor = self.model(phase, **batch, caches=self.caches)
        self.advance(new_tokens)
        return logits

    def _slots(self, row: int, count: int) -> Tensor:
        position = torch.arange(self.lengths[row], self.lengths[row] + count)
        block = self.block_table[row, torch.div(position, self.block_size, rounding_mode="floor")]
        return block * self.block_size + position % self.block_size


def evaluate(
    model: HybridModel,
    token_ids: Tensor,
    *,
    prefill_length: int | None = None,
    chunk: int | None = None,
    block_size: int = 16,
) -> Tensor:
    """Logits of every position of one sequence.

    Args:
        token_ids: [T]. prefill_length: tokens after this many are decoded one by one; None decodes none.
        chunk: prefill at most this many tokens at a time; None does all at once.

    Returns:
        [T, vocab].
    """
    session = EagerSession(model, max_context=len(token_ids), block_size=block_size)
    end = len(token_ids) if prefill_length is None else prefill_length
    pieces = [session.step([part]) for part in token_ids[:end].split(chunk or max(end, 1))]
    pieces += [session.step([token.view(1)], "decode") for token in token_ids[end:]]
    return torch.cat(pieces)
