"""The least that a step must do: bytes it reads, operations it makes; from the config alone."""

from __future__ import annotations

from hybridge.models.checkpoint import weight_sources
from hybridge.models.config import ModelConfig

_BF16, _FP32 = 2, 4


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """How many experts of a layer so many tokens choose, on average, where all are as likely."""
    missed = (1 - config.moe.top_k / config.moe.num_experts) ** tokens
    return config.moe.num_experts * (1 - missed)


def weight_bytes(config: ModelConfig, tokens: int) -> float:
    """Bytes of weights that a step of so many tokens reads once."""
    total = 0.0
    for source in weight_sources(config):
        size = float(source.numel * _BF16)
        if ".experts." in source.name:
            # Packed codes and scales are bytes, whichever they are.
            size = source.numel * (1 if source.storage == "uint8" else _BF16)
            size *= distinct_experts(config, tokens) / config.moe.num_experts
        elif source.name == "model.embed_tokens.weight":
            size = float(tokens * config.hidden_size * _BF16)
        total += size
    return total


def key_bytes(config: ModelConfig, rows: int, context: int) -> float:
    """Bytes of bf16 keys that the indexers of a decode step read."""
    assert config.dsa is not None
    layers = config.layer_kinds.count("dsa")
    return float(layers * rows * context * config.dsa.head_dim * _BF16)


def key_operations(config: ModelConfig, rows: int, context: int) -> float:
    """Multiplications and additions of every head's query with every key."""
    assert config.dsa is not None
    return key_bytes(config, rows, context) / _BF16 * config.dsa.num_heads * 2


def cache_bytes(config: ModelConfig, rows: int, context: int) -> float:
    """Bytes of caches and states that a decode step reads and writes beside the keys, paged caches in bf16."""
    assert config.dsa is not None
    latents = (
        min(config.dsa.top_k, context) * (config.kv_lora_rank + config.qk_rope_head_dim) * _BF16
    )
    kda = config.kda
    state = 2 * kda.num_heads * kda.head_dim**2 * _FP32
    kinds = config.layer_kinds
    return rows * float(kinds.count("dsa") * latents + kinds.count("kda") * state)


def prefill_operations(config: ModelConfig, tokens: int) -> float:
    """Multiplications and additions for a prompt of so many tokens, its last token's logits included."""
    assert config.dsa is not None
    matrices = 0.0
    for source in weight_sources(config):
        if len(source.shape) < 2 or source.name in ("model.embed_tokens.weight", "lm_head.weight"):
            continue
        share = config.moe.top_k / config.moe.num_experts if ".experts." in source.name else 1.0
        matrices += source.numel * share
    head = 2.0 * config.vocab_size * config.hidden_size
    kda = config.kda.num_heads * config.kda.head_dim**2 * 6.0
    visible = (tokens + 1) / 2
    indexer = 2.0 * visible * config.dsa.num_heads * config.dsa.head_dim
    row = config.kv_lora_rank + config.qk_rope_head_dim
    attended = min(visible, config.dsa.top_k)
    attention = 2.0 * attended * config.num_heads * (row + config.kv_lora_rank)
    kinds = config.layer_kinds
    mixing = kinds.count("kda") * kda + kinds.count("dsa") * (indexer + attention)
    return tokens * (2 * matrices + mixing) + head
