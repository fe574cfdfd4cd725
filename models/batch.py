"""A packed batch: which sequence and position every token has, derived once and used by every layer.

The plain maths here is what a target's kernels do from the same inputs; see DESIGN.md, graph signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Batch:
    """What the layers need to know of a batch of T packed tokens in B sequences.

    Args:
        phase: "decode" promises one token a sequence: token i belongs to row i.
        query_start: [B + 1]. context_len: [B]. slot_mapping: [T]. block_table: [B, max_blocks].
        state_slot: [B], -1 is an inactive row.
        token: [T], 0, 1, 2, ...
        sequence: [T], the row of each token's sequence (any row for padding).
        position: [T], the token's position in its sequence; -1 for padding.
        offset: [T], the token's index among the new tokens of its sequence.
    """

    phase: Phase
    query_start: Tensor
    context_len: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    state_slot: Tensor
    token: Tensor
    sequence: Tensor
    position: Tensor
    offset: Tensor

    @property
    def new_tokens(self) -> Tensor:
        """[B], how many tokens each sequence has in this call."""
        return self.query_start[1:] - self.query_start[:-1]

    @property
    def own(self) -> Tensor:
        """[T, B] bool, true where the row is the token's own sequence."""
        rows = torch.arange(self.context_len.shape[0], device=self.token.device)
        return self.sequence.unsqueeze(1) == rows


def make_batch(
    phase: Phase,
    token_count: int,
    query_start: Tensor,
    context_len: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    state_slot: Tensor,
) -> Batch:
    """Derive every token's sequence and position.

    Args:
        token_count: T, padding included. The other arguments as in `Batch`.
    """
    token = torch.arange(token_count, device=query_start.device)
    valid = token < query_start[-1]
    if phase == "decode":
        sequence = offset = torch.zeros_like(token)
        position = torch.where(valid, context_len, -1)
    else:
        row = (token.unsqueeze(1) >= query_start[1:]).sum(1)
        sequence = torch.where(valid, row, 0)
        offset = token - query_start[sequence]
        position = torch.where(valid, context_len[sequence] + offset, -1)
    return Batch(
        phase,
        query_start,
        context_len,
        slot_mapping,
        block_table,
        state_slot,
        token,
        sequence,
        position,
        offset,
    )
