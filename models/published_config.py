"""A config in the published format: config.json as the checkpoints of its family have it."""

from __future__ import annotations

from hybridge.models.model_config import MXFP4_FORMAT, DsaConfig, ModelConfig


def published_config(config: ModelConfig) -> dict[str, object]:
    """The parsed config.json of a config; layer lists count from 1."""
    text = _published_text(config)
    if config.family == "kimi_linear":
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "dtype": config.dtype,
            **text,
            **_published_quantization(config),
        }
    version = "31" if config.family == "kimi_k3.1" else "3"
    return {
        "architectures": [f"KimiK{version}ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": config.dtype,
        "tie_word_embeddings": False,
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"],
            **text,
            **_published_quantization(config),
        },
    }


def _published_text(config: ModelConfig) -> dict[str, object]:
    moe = config.moe
    eos: object = config.eos_token_id
    if len(config.eos_token_ids) > 1:
        eos = list(config.eos_token_ids)
    values: dict[str, object] = {
        "model_type": "kimi_linear",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "hidden_act": config.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": config.mla_output_gate,
        "mla_lora_norm_eps": config.mla_lora_norm_eps,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.num_shared,
        "moe_intermediate_size": moe.intermediate_size,
        "moe_renormalize": moe.renormalize,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": moe.layer_freq,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "linear_attn_config": _published_kda(config),
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
    }
    if config.activation == "situ":
        values["activation_situ_beta"] = config.situ_beta
        values["activation_situ_linear_beta"] = config.situ_linear_beta
    if moe.latent_size is not None:
        values["routed_expert_hidden_size"] = moe.latent_size
        values["latent_moe_use_norm"] = moe.latent_norm
    if config.attn_res_block_size is not None:
        values["attn_res_block_size"] = config.attn_res_block_size
    if config.dsa is not None:
        values["dsa_config"] = _published_dsa(config, config.dsa)
    return values


def _published_kda(config: ModelConfig) -> dict[str, object]:
    kda = config.kda
    values: dict[str, object] = {
        "full_attn_layers": [i + 1 for i in config.full_attention_layers],
        "kda_layers": [i + 1 for i in config.kda_layers],
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_width,
    }
    if kda.gate_lower_bound is not None:
        values["gate_lower_bound"] = kda.gate_lower_bound
    if kda.full_rank_gate or config.family != "kimi_linear":
        values["use_full_rank_gate"] = kda.full_rank_gate
    return values


def _published_dsa(config: ModelConfig, dsa: DsaConfig) -> dict[str, object]:
    return {
        "index_n_heads": dsa.num_heads,
        "index_head_dim": dsa.head_dim,
        "index_topk": dsa.top_k,
        "index_norm_eps": dsa.norm_eps,
        "dsa_layers": [i + 1 for i in config.full_attention_layers],
    }


def _published_quantization(config: ModelConfig) -> dict[str, object]:
    if config.quantization is None:
        return {}
    weights = {
        "num_bits": 4,
        "type": "float",
        "group_size": config.quantization.group_size,
        "strategy": "group",
        "symmetric": True,
        "scale_dtype": "torch.uint8",
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": MXFP4_FORMAT,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": list(config.quantization.ignore),
        }
    }
