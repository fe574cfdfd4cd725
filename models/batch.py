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
class Packing:
    """How tokens of several sequences lie in one batch: prefill only.

    A short convolution of width W reads rows of `cat(histories, tokens)`: first each sequence's W - 1 history
    rows, then the T tokens.

    Args:
        sequence: [T], the row of each token's sequence (row 0 for padding).
        own: [T, B] bool, true where the row is the token's own sequence.
        window: [T, W], for each token the rows under the taps, oldest first.
        kept: [B, W - 1], the rows that are each sequence's history after this call.
        kept_slot: [B], where that history is written: -1 for a sequence without new tokens.
    """

    sequence: Tensor
    own: Tensor
    window: Tensor
    kept: Tensor
    kept_slot: Tensor


@dataclass(frozen=True)
class Batch:
    """What the layers need to know of a batch of T packed tokens in B sequences.

    Args:
        query_start: [B + 1]. context_len: [B]. slot_mapping: [T]. block_table: [B, max_blocks].
        state_slot: [B], -1 is an inactive row.
        token: [T], 0, 1, 2, ...
        position: [T], the token's position in its sequence; -1 for padding.
        packing: None in decode, where token i belongs to row i.
    """

    query_start: Tensor
    context_len: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    state_slot: Tensor
    token: Tensor
    position: Tensor
    packing: Packing | None


def make_batch(
    phase: Phase,
    token_count: int,
    conv_width: int,
    query_start: Tensor,
    context_len: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    state_slot: Tensor,
) -> Batch:
    """Derive every token's sequence and position.

    Args:
        token_count: T, padding included. conv_width: W of the short convolutions.
        The other arguments as in `Batch`.
    """
    token = torch.arange(token_count, device=query_start.device)
    valid = token < query_start[-1]
    packing = None
    if phase == "decode":
        position = torch.where(valid, context_len, -1)
    else:
        row = (token.unsqueeze(1) >= query_start[1:]).sum(1)
        sequence = torch.where(valid, row, 0)
        offset = token - query_start[sequence]
        position = torch.where(valid, context_len[sequence] + offset, -1)
        packing = _pack(token, sequence, offset, conv_width, query_start, state_slot)
    return Batch(
        query_start,
        context_len,
        slot_mapping,
        block_table,
        state_slot,
        token,
        position,
        packing,
    )


def _pack(
    token: Tensor,
    sequence: Tensor,
    offset: Tensor,
    conv_width: int,
    query_start: Tensor,
    state_slot: Tensor,
) -> Packing:
    history = conv_width - 1
    rows = torch.arange(state_slot.shape[0], device=token.device)
    first_token_row = state_slot.shape[0] * history
    # Tap i of a token lies `history - i` tokens back: among the new tokens, or before them in the history.
    back = history - torch.arange(conv_width, device=token.device)
    place = offset.unsqueeze(1) - back
    window = torch.where(
        place >= 0,
        first_token_row + token.unsqueeze(1) - back,
        sequence.unsqueeze(1) * history + history + place,
    )
    new_tokens = query_start[1:] - query_start[:-1]
    # Of [history | new tokens] the last `history` rows are kept.
    place = new_tokens.unsqueeze(1) + torch.arange(history, device=token.device)
    kept = torch.where(
        place >= history,
        first_token_row + query_start[:-1].unsqueeze(1) + place - history,
        rows.unsqueeze(1) * history + place,
    )
    own = sequence.unsqueeze(1) == rows
    return Packing(sequence, own, window, kept, torch.where(new_tokens > 0, state_slot, -1))
