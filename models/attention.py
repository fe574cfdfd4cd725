"""Absorbed MLA in plain maths: dense and over selected positions, one form a phase.

Decode reads each sequence's own rows. Prefill multiplies all tokens with all sequences' rows, one matrix
product, and masks the foreign ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridge.models.batch import Batch
from hybridge.models.paged import chosen_rows, sequence_pages


def masked_attention(
    query: Tensor, rows: Tensor, mask: Tensor, scale: float, value_dim: int, softmax: nn.Softmax
) -> Tensor:
    """softmax(scale * query rows^T) rows[..., :value_dim] over the rows that the mask admits.

    Args:
        query: [T, H, D]. rows: [T, S, D], or [S, D] shared by all tokens. mask: [T, S].
        softmax: over the last dimension: a module, so that probabilities can be observed.

    Returns:
        [T, H, value_dim]; zeros for a token whose mask is empty.
    """
    admitted = mask.unsqueeze(1)
    scores = scale * (query @ rows.transpose(-1, -2))
    weights = softmax(scores.masked_fill(~admitted, float("-inf")))
    return weights.masked_fill(~admitted, 0.0) @ rows[..., :value_dim]


def dense_attention(
    query: Tensor,
    latent_cache: Tensor,
    batch: Batch,
    scale: float,
    value_dim: int,
    softmax: nn.Softmax,
) -> Tensor:
    """Causal attention over a token's whole sequence (spec/MODELS.md 4.2).

    Args:
        query: [T, H, latent + rope]. latent_cache: [blocks, block, 1, latent + rope].
        softmax: see `masked_attention`.

    Returns:
        [T, H, value_dim].
    """
    rows = sequence_pages(latent_cache, batch.block_table)
    column = torch.arange(rows.shape[1], device=rows.device)
    visible = column <= batch.position.unsqueeze(1)
    return _attend_pages(query, rows, visible, batch, scale, value_dim, softmax)


def sparse_attention(
    query: Tensor,
    latent_cache: Tensor,
    positions: Tensor,
    batch: Batch,
    scale: float,
    value_dim: int,
    softmax: nn.Softmax,
) -> Tensor:
    """Attention over the selected positions only (spec/MODELS.md 4.6).

    Args:
        query: [T, H, latent + rope]. latent_cache: [blocks, block, 1, latent + rope].
        positions: [T, k], -1 is empty. softmax: see `masked_attention`.

    Returns:
        [T, H, value_dim].
    """
    if batch.packing is None:
        rows = chosen_rows(latent_cache, batch.block_table, positions)
        return masked_attention(query, rows, positions >= 0, scale, value_dim, softmax)
    rows = sequence_pages(latent_cache, batch.block_table)
    length = rows.shape[1]
    # Empty positions select a column past the end, which is cut off again.
    column = torch.where(positions >= 0, positions, length).long()
    selected = torch.zeros(query.shape[0], length + 1, device=query.device)
    selected = selected.scatter(1, column, 1.0)[:, :length] > 0
    return _attend_pages(query, rows, selected, batch, scale, value_dim, softmax)


def _attend_pages(
    query: Tensor,
    rows: Tensor,
    visible: Tensor,
    batch: Batch,
    scale: float,
    value_dim: int,
    softmax: nn.Softmax,
) -> Tensor:
    """rows [B, S, D], visible [T, S] within the token's own sequence."""
    if batch.packing is None:
        return masked_attention(query, rows, visible, scale, value_dim, softmax)
    mask = (batch.packing.own.unsqueeze(2) & visible.unsqueeze(1)).flatten(1)
    return masked_attention(query, rows.flatten(0, 1), mask, scale, value_dim, softmax)
