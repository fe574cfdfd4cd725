"""The eager model: embedding, layers, depth aggregation, head; the definition that every graph must equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from torch import Tensor, nn

import hybridge.ops  # noqa: F401  (registers the ops that the layers call)
from hybridge.models.attn_res import mix
from hybridge.models.batch import Batch, Phase, make_batch
from hybridge.models.config import ModelConfig
from hybridge.models.kda import KdaAttention
from hybridge.models.layers import Embedding, GatedMlp, Linear, RmsNorm
from hybridge.models.mla import MlaAttention
from hybridge.models.moe import MoeBlock


class DecoderLayer(nn.Module):
    """One attention sublayer and one feed-forward sublayer, with their AttnRes queries if any."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kind = config.layer_kinds[layer]
        attention = KdaAttention if kind == "kda" else MlaAttention
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(config, layer)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        if config.is_moe_layer(layer):
            self.block_sparse_moe = MoeBlock(config)
        else:
            self.mlp = GatedMlp(config, config.intermediate_size)
        if config.attn_res_block_size is not None:
            self.self_attention_res_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
            self.self_attention_res_proj = Linear(config.hidden_size, 1)
            self.mlp_res_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp_res_proj = Linear(config.hidden_size, 1)

    def attention(self, h: Tensor, caches: Mapping[str, Tensor], batch: Batch) -> Tensor:
        result: Tensor = self.self_attn(self.input_layernorm(h), caches, batch)
        return result

    def feed_forward(self, h: Tensor) -> Tensor:
        block = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        result: Tensor = block(self.post_attention_layernorm(h))
        return result


class Decoder(nn.Module):
    """Embedding to final norm; parameter names are the published ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
            self.output_attn_res_proj = Linear(config.hidden_size, 1)

    def forward(self, token_ids: Tensor, caches: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """token_ids [T] -> hidden states [T, D] before the final norm."""
        embedded = self.embed_tokens(token_ids)
        if self.config.attn_res_block_size is None:
            return self._plain_residuals(embedded, caches, batch)
        return self._attention_residuals(embedded, caches, batch)

    def _layers(self) -> Iterable[DecoderLayer]:
        return cast(Iterable[DecoderLayer], self.layers)

    def _plain_residuals(
        self, hidden: Tensor, caches: Mapping[str, Tensor], batch: Batch
    ) -> Tensor:
        for layer in self._layers():
            hidden = hidden + layer.attention(hidden, caches, batch)
            hidden = hidden + layer.feed_forward(hidden)
        return hidden

    def _attention_residuals(
        self, prefix: Tensor, caches: Mapping[str, Tensor], batch: Batch
    ) -> Tensor:
        """The layer rule of spec/MODELS.md 6.2: a boundary layer stores the entering prefix, raw."""
        size = self.config.attn_res_block_size
        assert size is not None
        blocks: list[Tensor] = []
        for index, layer in enumerate(self._layers()):
            query = layer.self_attention_res_proj.weight
            h = mix([*blocks, prefix], layer.self_attention_res_norm, query)
            starts_block = index % size == 0
            if starts_block:
                blocks.append(prefix)
            attended = layer.attention(h, caches, batch)
            prefix = attended if starts_block else prefix + attended
            h = mix([*blocks, prefix], layer.mlp_res_norm, layer.mlp_res_proj.weight)
            prefix = prefix + layer.feed_forward(h)
        query = self.output_attn_res_proj.weight
        return mix([*blocks, prefix], self.output_attn_res_norm, query)


class HybridModel(nn.Module):
    """The whole model. `forward` takes the graph signature of DESIGN.md and writes the caches in place."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(
        self,
        phase: Phase,
        token_ids: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        state_slot: Tensor,
        logits_index: Tensor,
        caches: Mapping[str, Tensor],
    ) -> Tensor:
        """Args:
            phase: "prefill" takes any ragged batch, "decode" one token a sequence.
            token_ids: [T]; tokens from query_start[-1] on are padding and change nothing.
            query_start: [B + 1]. context_len: [B], tokens cached before this call.
            slot_mapping: [T], the cache row of each token, -1 writes nothing.
            block_table: [B, max_blocks]. state_slot: [B], -1 is an inactive row.
            logits_index: [L], the tokens whose logits are wanted.
            caches: see `caches.cache_shapes`; written in place.

        Returns:
            logits [L, vocab].
        """
        batch = make_batch(
            phase,
            token_ids.shape[0],
            self.config.kda.conv_width,
            query_start,
            context_len,
            slot_mapping,
            block_table,
            state_slot,
        )
        hidden = self.model(token_ids, caches, batch)
        logits: Tensor = self.lm_head(self.model.norm(hidden[logits_index]))
        return logits
