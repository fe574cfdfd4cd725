"""The caches and states of a model: their names, order and shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridge.models.config import ModelConfig


@dataclass(frozen=True)
class CacheShape:
    """One cache or state of the graph signature.

    Args:
        name: its input name, such as `latent_cache_3`.
        layer: the 0-indexed layer.
        kind: "latent", "indexer", "kda_state" or "conv_state".
        row: the shape of one row: after [blocks, block] for a paged cache, after [slots] for a state.
    """

    name: str
    layer: int
    kind: str
    row: tuple[int, ...]

    @property
    def paged(self) -> bool:
        return self.kind in ("latent", "indexer")

    def shape(self, blocks: int, block_size: int, slots: int) -> tuple[int, ...]:
        return (blocks, block_size, *self.row) if self.paged else (slots, *self.row)


def cache_shapes(config: ModelConfig) -> tuple[CacheShape, ...]:
    """Every cache of the model, in the order of the graph signature."""
    found: list[CacheShape] = []
    kda = config.kda
    projected = 3 * kda.num_heads * kda.head_dim
    for layer, kind in enumerate(config.layer_kinds):
        if kind == "kda":
            memory = (kda.num_heads, kda.head_dim, kda.head_dim)
            found.append(CacheShape(f"kda_state_{layer}", layer, "kda_state", memory))
            history = (projected, kda.conv_width - 1)
            found.append(CacheShape(f"conv_state_{layer}", layer, "conv_state", history))
            continue
        row = (1, config.kv_lora_rank + config.qk_rope_head_dim)
        found.append(CacheShape(f"latent_cache_{layer}", layer, "latent", row))
        if kind == "dsa" and config.dsa is not None:
            key = (1, config.dsa.head_dim)
            found.append(CacheShape(f"indexer_cache_{layer}", layer, "indexer", key))
    return tuple(found)


def allocate_caches(
    config: ModelConfig,
    blocks: int,
    block_size: int,
    slots: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Zeroed caches; the recurrent state is at least fp32 whatever `dtype` is."""
    result = {}
    for cache in cache_shapes(config):
        wide = torch.promote_types(dtype, torch.float32)
        kind = wide if cache.kind == "kda_state" else dtype
        shape = cache.shape(blocks, block_size, slots)
        result[cache.name] = torch.zeros(shape, dtype=kind, device=device)
    return result
