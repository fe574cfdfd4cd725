"""Plain reads of paged caches: whole sequences, or chosen rows."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """Every row that the block table reaches.

    Args:
        cache: [blocks, block, 1, D].
        block_table: [B, max_blocks]; negative entries read block 0, which a mask must hide.

    Returns:
        [B, max_blocks * block, D].
    """
    return cache[block_table.clamp(min=0)].flatten(1, 3)


def chosen_rows(cache: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """The rows at `positions` of each sequence.

    Args:
        cache: [blocks, block, 1, D].
        block_table: [B, max_blocks].
        positions: [B, k]; negative positions read position 0, which a mask must hide.

    Returns:
        [B, k, D].
    """
    block = cache.shape[1]
    reached = positions.clamp(min=0).long()
    blocks = block_table.gather(1, torch.div(reached, block, rounding_mode="floor"))
    return cache.flatten(0, 2)[blocks.clamp(min=0) * block + reached % block]
