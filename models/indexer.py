"""The lightning indexer of DSA in plain maths (spec/MODELS.md 4.4, 4.5)."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from hybridge.models.batch import Batch
from hybridge.models.config import DsaConfig, ModelConfig
from hybridge.models.layers import LayerNorm, Linear
from hybridge.models.paged import sequence_pages

# Sorts behind every position; int32 so that it survives a cast of the positions.
NO_POSITION = 2**31 - 1


def score_keys(query: Tensor, head_weights: Tensor, keys: Tensor, batch: Batch) -> Tensor:
    """sum_h head_weights[t, h] * relu(query[t, h] . key[s]) for every s of the token's sequence.

    Args:
        query: [T, H, D]. head_weights: [T, H]. keys: [B, S, D].

    Returns:
        [T, S].
    """
    if batch.packing is None:
        products = torch.relu(query @ keys.transpose(1, 2))
        return (products * head_weights.unsqueeze(-1)).sum(1)
    products = torch.relu(query @ keys.flatten(0, 1).transpose(0, 1))
    every = (products * head_weights.unsqueeze(-1)).sum(1)
    return every.unflatten(1, keys.shape[:2])[batch.token, batch.packing.sequence]


def select_positions(score: Tensor, position: Tensor, top_k: int) -> Tensor:
    """The visible positions of the top_k largest scores.

    Args:
        score: [T, S]. position: [T], the last visible one.

    Returns:
        [T, top_k] int32, ascending, then -1; ties go to the lowest position.
    """
    last = position.unsqueeze(1)
    column = torch.arange(score.shape[1], device=score.device)
    visible = score.masked_fill(column > last, float("-inf"))
    # A sequence may have fewer than top_k columns: padding keeps the shape, the mask below drops it.
    padded = functional.pad(visible, (0, top_k), value=float("-inf"))
    order = torch.sort(padded, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = torch.where(order <= last, order, NO_POSITION)
    ascending = torch.sort(chosen, dim=-1).values
    return torch.where(ascending == NO_POSITION, -1, ascending).to(torch.int32)


class Indexer(nn.Module):
    """Chooses the positions that a DSA layer attends to; caches one key a token."""

    def __init__(self, config: ModelConfig, dsa: DsaConfig) -> None:
        super().__init__()
        if config.q_lora_rank is None:
            raise ValueError("a DSA layer needs q_lora_rank: the indexer's query reads it")
        self.dsa = dsa
        self.wq_b = Linear(config.q_lora_rank, dsa.num_heads * dsa.head_dim)
        self.wk = Linear(config.hidden_size, dsa.head_dim)
        self.weights_proj = Linear(config.hidden_size, dsa.num_heads)
        self.k_norm = LayerNorm(dsa.head_dim, dsa.norm_eps)

    def forward(
        self, x: Tensor, query_latent: Tensor, indexer_cache: Tensor, batch: Batch
    ) -> Tensor:
        """Args:
            x: [T, D] the normed layer input. query_latent: [T, q_lora], after its norm.
            indexer_cache: [blocks, block, 1, head_dim], written in place.

        Returns:
            [T, top_k] int32 positions.
        """
        key = self.k_norm(self.wk(x))
        torch.ops.hybridge.paged_write(indexer_cache, key.unsqueeze(1), batch.slot_mapping)
        query = self.wq_b(query_latent).unflatten(-1, (self.dsa.num_heads, self.dsa.head_dim))
        scale = self.dsa.num_heads**-0.5 * self.dsa.head_dim**-0.5
        head_weights = self.weights_proj(x) * scale
        keys = sequence_pages(indexer_cache, batch.block_table)
        score = score_keys(query, head_weights, keys, batch)
        return select_positions(score, batch.position, self.dsa.top_k)
