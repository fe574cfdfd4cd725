"""The full-attention layer: MLA, dense or, with an indexer, sparse (DSA) (spec/MODELS.md 4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hybridge.models.attention import dense_attention, sparse_attention
from hybridge.models.batch import Batch
from hybridge.models.config import ModelConfig
from hybridge.models.indexer import Indexer
from hybridge.models.layers import Linear, RmsNorm


class HeadProduct(nn.Module):
    """A product with a weight of each head, by its einsum equation: a module, so that its input can be observed."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, weight)


class MlaAttention(nn.Module):
    """Absorbed MLA over the paged latent cache; a `dsa` layer attends to its indexer's choice."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, heads, rank = config.hidden_size, config.num_heads, config.q_lora_rank
        query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        if rank is None:
            self.q_proj = Linear(hidden, heads * query_dim)
        else:
            self.q_a_proj = Linear(hidden, rank)
            self.q_a_layernorm = RmsNorm(rank, config.mla_lora_norm_eps)
            self.q_b_proj = Linear(rank, heads * query_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.mla_lora_norm_eps)
        head_rows = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * head_rows)
        self.absorb_query = HeadProduct("thn,hnc->thc")
        self.softmax = nn.Softmax(dim=-1)
        self.expand_value = HeadProduct("thc,hvc->thv")
        if config.mla_output_gate:
            self.g_proj = Linear(hidden, heads * config.v_head_dim)
        self.o_proj = Linear(heads * config.v_head_dim, hidden)
        if config.layer_kinds[layer] == "dsa":
            assert config.dsa is not None
            self.indexer = Indexer(config, config.dsa)

    def forward(self, x: Tensor, caches: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Args:
            x: [T, D], the normed layer input.
            caches: `latent_cache_{layer}` (and `indexer_cache_{layer}`), written in place.

        Returns:
            [T, D].
        """
        config = self.config
        latent_cache = caches[f"latent_cache_{self.layer}"]
        query_latent, query = self._queries(x)
        latent, rope_key = self.kv_a_proj_with_mqa(x).split(
            (config.kv_lora_rank, config.qk_rope_head_dim), dim=-1
        )
        row = torch.cat([self.kv_a_layernorm(latent), rope_key], dim=-1)
        torch.ops.hybridge.paged_write(latent_cache, row.unsqueeze(1), batch.slot_mapping)

        key_up, value_up = self.kv_b_proj.weight.unflatten(0, (config.num_heads, -1)).split(
            (config.qk_nope_head_dim, config.v_head_dim), dim=1
        )
        plain, rope = query.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
        absorbed = torch.cat([self.absorb_query(plain, key_up), rope], dim=-1)
        mixed = self._attend(x, query_latent, absorbed, caches, batch)
        output = self.expand_value(mixed, value_up).flatten(1)
        if config.mla_output_gate:
            output = output * torch.sigmoid(self.g_proj(x))
        return self.o_proj(output)

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(the query latent after its norm, or x where there is none; [T, H, nope + rope])."""
        if self.config.q_lora_rank is None:
            return x, self.q_proj(x).unflatten(-1, (self.config.num_heads, -1))
        latent = self.q_a_layernorm(self.q_a_proj(x))
        return latent, self.q_b_proj(latent).unflatten(-1, (self.config.num_heads, -1))

    def _attend(
        self,
        x: Tensor,
        query_latent: Tensor,
        query: Tensor,
        caches: Mapping[str, Tensor],
        batch: Batch,
    ) -> Tensor:
        config, cache = self.config, caches[f"latent_cache_{self.layer}"]
        scale, value_dim = config.softmax_scale, config.kv_lora_rank
        if config.layer_kinds[self.layer] == "mla":
            return dense_attention(query, cache, batch, scale, value_dim, self.softmax)
        indexer_cache = caches[f"indexer_cache_{self.layer}"]
        positions = self.indexer(x, query_latent, indexer_cache, batch)
        return sparse_attention(query, cache, positions, batch, scale, value_dim, self.softmax)
