"""Configurations by name: the published models at full size, and small ones of the same shape.

Sources of the full sizes: the published configurations of Kimi-Linear-48B-A3B, Kimi K3 and
Kimi K3.1-Pro.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from hybridge.artifacts.errors import UsageError
from hybridge.models.config import (
    DsaConfig,
    KdaConfig,
    LayerKind,
    ModelConfig,
    MoeConfig,
    Mxfp4Config,
    WeightType,
    config_from_dict,
)

# What compressed-tensors leaves alone when only the routed experts are quantised.
_MXFP4_IGNORE: Final = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*routed_expert.*",
    "re:.*gate$",
)
MXFP4: Final = Mxfp4Config(ignore=_MXFP4_IGNORE)
_WIDTH_MULTIPLE: Final = 32


def layer_pattern(num_layers: int, attention: LayerKind) -> tuple[LayerKind, ...]:
    """Full attention at every fourth layer and at the last; KDA elsewhere.

    93 layers give 24 full-attention layers (the last two both), 27 give 7, as published.
    """
    return tuple(
        attention if (i + 1) % 4 == 0 or i + 1 == num_layers else "kda" for i in range(num_layers)
    )


def preset_names() -> tuple[str, ...]:
    """All preset names, sorted."""
    return tuple(sorted(_PRESETS))


def preset(name: str) -> ModelConfig:
    """A configuration by name.

    Raises:
        UsageError: no preset has this name.
    """
    if name not in _PRESETS:
        raise UsageError(
            f"there is no preset '{name}'", f"known presets: {', '.join(preset_names())}"
        )
    return _checked(_PRESETS[name](), f"preset {name}")


def scale(
    config: ModelConfig,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    experts: int | None = None,
    dtype: WeightType | None = None,
    mxfp4: bool | None = None,
) -> ModelConfig:
    """A configuration of another size, consistent in itself.

    Args:
        config: what to start from.
        layers: number of layers; the pattern (every fourth and the last) is laid anew, and an
            Attention Residuals block that would no longer fit twice shrinks to half the layers.
        hidden: hidden size; heads, FFN widths, latent and query ranks follow in proportion (widths
            rounded to 32), while head sizes, the key/value latent and the indexer stay.
        experts: routed experts; top-k shrinks to fit.
        dtype: type of the unquantised weights.
        mxfp4: quantise the routed experts, or not.

    Raises:
        CheckpointError: the sizes asked for contradict each other or are not positive.
    """
    if hidden is not None:
        config = _with_hidden(config, hidden)
    if layers is not None:
        config = _with_layers(config, layers)
    if experts is not None:
        top_k = min(config.moe.top_k, experts)
        moe = dataclasses.replace(config.moe, num_experts=experts, top_k=top_k)
        config = dataclasses.replace(config, moe=moe)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    if mxfp4 is not None:
        config = dataclasses.replace(config, quantization=MXFP4 if mxfp4 else None)
    return _checked(config, "scaled config")


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """The same config, through the reader's checks and with `raw` set."""
    return config_from_dict(config.to_published(), source=source)


def _with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    if layers == config.num_layers:
        return config
    attention: LayerKind = "mla" if config.dsa is None else "dsa"
    block = config.attn_res_block_size
    if block is not None and layers < 2 * block:
        block = max(1, min(block, layers // 2))
    return dataclasses.replace(
        config,
        num_layers=layers,
        layer_kinds=layer_pattern(layers, attention),
        attn_res_block_size=block,
        moe=dataclasses.replace(
            config.moe, first_dense=max(0, min(config.moe.first_dense, layers))
        ),
    )


def _with_hidden(config: ModelConfig, hidden: int) -> ModelConfig:
    def width(size: int) -> int:
        scaled = size * hidden // config.hidden_size
        return max(_WIDTH_MULTIPLE, scaled // _WIDTH_MULTIPLE * _WIDTH_MULTIPLE)

    def heads(count: int) -> int:
        return max(1, count * hidden // config.hidden_size)

    if hidden == config.hidden_size:
        return config
    moe, kda = config.moe, config.kda
    return dataclasses.replace(
        config,
        hidden_size=hidden,
        num_heads=heads(config.num_heads),
        q_lora_rank=None if config.q_lora_rank is None else width(config.q_lora_rank),
        intermediate_size=width(config.intermediate_size),
        kda=dataclasses.replace(kda, num_heads=heads(kda.num_heads)),
        moe=dataclasses.replace(
            moe,
            intermediate_size=width(moe.intermediate_size),
            latent_size=None if moe.latent_size is None else width(moe.latent_size),
        ),
    )


def _kimi_k3() -> ModelConfig:
    return ModelConfig(
        family="kimi_k3",
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        layer_kinds=layer_pattern(93, "mla"),
        rms_norm_eps=1e-5,
        num_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_output_gate=True,
        mla_lora_norm_eps=1e-6,
        kda=KdaConfig(96, 128, conv_width=4, gate_lower_bound=-5.0, full_rank_gate=True),
        dsa=None,
        moe=MoeConfig(
            num_experts=896,
            top_k=16,
            num_shared=2,
            intermediate_size=3072,
            latent_size=3584,
            latent_norm=True,
            renormalize=True,
            routed_scaling_factor=1.0,
            first_dense=1,
            layer_freq=1,
        ),
        intermediate_size=33792,
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attn_res_block_size=12,
        quantization=MXFP4,
        dtype="bfloat16",
        max_position_embeddings=1048576,
        bos_token_id=163584,
        eos_token_id=163586,
        eos_token_ids=(163586,),
        pad_token_id=163839,
    )


def _with_dsa(config: ModelConfig, heads: int, head_dim: int, top_k: int) -> ModelConfig:
    """The K3.1 counterpart of a K3 config: sparse attention in every full-attention layer."""
    kinds: tuple[LayerKind, ...] = tuple("kda" if k == "kda" else "dsa" for k in config.layer_kinds)
    dsa = DsaConfig(heads, head_dim, top_k, norm_eps=config.rms_norm_eps)
    return dataclasses.replace(config, family="kimi_k3.1", layer_kinds=kinds, dsa=dsa)


def _kimi_k31_pro() -> ModelConfig:
    return _with_dsa(_kimi_k3(), heads=32, head_dim=128, top_k=2048)


def _kimi_linear_48b() -> ModelConfig:
    return dataclasses.replace(
        _kimi_k3(),
        family="kimi_linear",
        hidden_size=2304,
        num_layers=27,
        layer_kinds=layer_pattern(27, "mla"),
        num_heads=32,
        q_lora_rank=None,
        mla_output_gate=False,
        kda=KdaConfig(32, 128, conv_width=4, gate_lower_bound=None, full_rank_gate=False),
        moe=MoeConfig(
            num_experts=256,
            top_k=8,
            num_shared=1,
            intermediate_size=1024,
            latent_size=None,
            latent_norm=False,
            renormalize=True,
            routed_scaling_factor=2.446,
            first_dense=1,
            layer_freq=1,
        ),
        intermediate_size=9216,
        activation="silu",
        situ_beta=1.0,
        situ_linear_beta=None,
        attn_res_block_size=None,
        quantization=None,
    )


def _tiny_sizes(config: ModelConfig, num_layers: int) -> ModelConfig:
    """The sizes of the golden checkpoints: everything computes in milliseconds."""
    latent = None if config.moe.latent_size is None else 32
    attention: LayerKind = "mla" if config.dsa is None else "dsa"
    return dataclasses.replace(
        config,
        vocab_size=256,
        hidden_size=64,
        num_layers=num_layers,
        layer_kinds=layer_pattern(num_layers, attention),
        num_heads=4,
        q_lora_rank=None if config.q_lora_rank is None else 24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        kda=dataclasses.replace(config.kda, num_heads=4, head_dim=16),
        moe=dataclasses.replace(
            config.moe, num_experts=8, top_k=2, intermediate_size=32, latent_size=latent
        ),
        intermediate_size=96,
        attn_res_block_size=None if config.attn_res_block_size is None else 3,
        quantization=None,
        dtype="float32",
        bos_token_id=253,
        eos_token_id=254,
        eos_token_ids=(254,),
        pad_token_id=255,
    )


def _kimi_k3_tiny() -> ModelConfig:
    return _tiny_sizes(_kimi_k3(), num_layers=8)


def _kimi_k31_tiny() -> ModelConfig:
    # 16 indexer heads: with few, all products can be negative, and exact ties at 0.0 are common.
    return _with_dsa(_kimi_k3_tiny(), heads=16, head_dim=16, top_k=8)


def _kimi_linear_tiny() -> ModelConfig:
    return _tiny_sizes(_kimi_linear_48b(), num_layers=4)


def _kimi_k31_demo() -> ModelConfig:
    """Small enough to compile in seconds, large enough that top-k, blocks and experts matter."""
    tiny = _kimi_k31_tiny()
    return dataclasses.replace(
        tiny,
        vocab_size=4096,
        hidden_size=256,
        num_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        kda=dataclasses.replace(tiny.kda, num_heads=4, head_dim=32),
        dsa=DsaConfig(num_heads=16, head_dim=32, top_k=64, norm_eps=1e-5),
        moe=dataclasses.replace(
            tiny.moe, num_experts=16, top_k=4, intermediate_size=96, latent_size=128
        ),
        intermediate_size=768,
        attn_res_block_size=4,
        max_position_embeddings=65536,
        bos_token_id=4093,
        eos_token_id=4094,
        eos_token_ids=(4094,),
        pad_token_id=4095,
    )


def _kimi_k31_bench() -> ModelConfig:
    """Realistic head sizes and ranks at a size that one CPU socket runs."""
    pro = _kimi_k31_pro()
    return dataclasses.replace(
        pro,
        vocab_size=32768,
        hidden_size=2048,
        num_layers=8,
        layer_kinds=layer_pattern(8, "dsa"),
        num_heads=16,
        q_lora_rank=768,
        kda=dataclasses.replace(pro.kda, num_heads=16, head_dim=128),
        dsa=DsaConfig(num_heads=32, head_dim=128, top_k=512, norm_eps=1e-5),
        moe=dataclasses.replace(
            pro.moe, num_experts=32, top_k=4, intermediate_size=1024, latent_size=1024
        ),
        intermediate_size=8192,
        attn_res_block_size=4,
        quantization=None,
        max_position_embeddings=131072,
        bos_token_id=32765,
        eos_token_id=32766,
        eos_token_ids=(32766,),
        pad_token_id=32767,
    )


_PRESETS: Final[dict[str, Callable[[], ModelConfig]]] = {
    "kimi-k3": _kimi_k3,
    "kimi-k3-tiny": _kimi_k3_tiny,
    "kimi-k3.1-bench": _kimi_k31_bench,
    "kimi-k3.1-demo": _kimi_k31_demo,
    "kimi-k3.1-pro": _kimi_k31_pro,
    "kimi-k3.1-tiny": _kimi_k31_tiny,
    "kimi-linear-48b-a3b": _kimi_linear_48b,
    "kimi-linear-tiny": _kimi_linear_tiny,
}
