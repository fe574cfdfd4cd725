"""From parsed JSON to a `ModelConfig`: every field read strictly and checked against the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, cast

from hybridge.models.config_family import family_of
from hybridge.models.config_section import Section, SharedFields
from hybridge.models.model_config import (
    MXFP4_FORMAT,
    MXFP4_GROUP,
    Activation,
    DsaConfig,
    Family,
    KdaConfig,
    LayerKind,
    ModelConfig,
    MoeConfig,
    Mxfp4Config,
    WeightType,
)

DEFAULT_LATENT_NORM_EPS: Final = 1e-6

# Fields that published configs carry and that decide nothing here. `head_dim` of Kimi Linear (72)
# is neither the MLA's nor the KDA's; rope_theta is inert because no layer rotates anything.
_IGNORED: Final = frozenset(
    (
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "ep_size",
        "head_dim",
        "id2label",
        "image_token_id",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "media_placeholder_token_id",
        "mm_projector_config",
        "model_max_length",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "projector_config",
        "return_dict",
        "rope_interleave",
        "rope_parameters",
        "rope_theta",
        "router_aux_loss_coef",
        "seq_aux",
        "transformers_version",
        "use_cache",
        "use_unified_vision_chunk",
        "video_placeholder",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    )
)
_DSA_ALIASES: Final = {
    "heads": ("index_n_heads", "index_num_heads", "num_heads", "n_heads"),
    "head_dim": ("index_head_dim", "head_dim"),
    "top_k": ("index_topk", "index_top_k", "top_k", "topk"),
    "norm_eps": ("index_norm_eps", "index_k_norm_eps", "k_norm_eps", "norm_eps"),
    "layers": ("dsa_layers", "full_attn_layers", "layers"),
}


def read_config(raw: Mapping[str, object], source: str) -> ModelConfig:
    """Read a configuration from parsed JSON: top-level fields, or nested in `text_config`.

    Args:
        raw: the parsed config.json.
        source: the file's name, for messages.

    Raises:
        CheckpointError: a field is missing, of a wrong type, not supported, or contradicts another.
    """
    top = Section(raw, source)
    text = top.optional_section("text_config") or top
    shared = SharedFields(top, text)
    family = family_of(top, text, shared)
    reader = _Reader(top, text, shared, family)
    config = reader.config()
    unknown = tuple(name for name in reader.unread() if name.rpartition(".")[2] not in _IGNORED)
    return dataclasses.replace(config, unknown_fields=unknown, raw=dict(raw))


class _Reader:
    """Reads and cross-checks the fields of one config."""

    def __init__(self, top: Section, text: Section, shared: SharedFields, family: Family) -> None:
        self.top = top
        self.text = text
        self.shared = shared
        self.family: Family = family
        self.is_k3 = family != "kimi_linear"
        self.nested: list[Section] = []

    def config(self) -> ModelConfig:
        text = self.text
        num_layers = text.integer("num_hidden_layers")
        num_heads = text.integer("num_attention_heads")
        vocab_size = text.integer("vocab_size")
        rms_norm_eps = text.positive("rms_norm_eps")
        linear = self._nested(text.section("linear_attn_config"))
        layer_kinds = self._layer_kinds(linear, num_layers)
        self._fixed_choices(num_heads)
        activation, beta, linear_beta = self._activation()
        q_lora_rank = text.optional_integer("q_lora_rank")
        config = ModelConfig(
            family=self.family,
            vocab_size=vocab_size,
            hidden_size=text.integer("hidden_size"),
            num_layers=num_layers,
            layer_kinds=layer_kinds,
            rms_norm_eps=rms_norm_eps,
            num_heads=num_heads,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=text.integer("kv_lora_rank"),
            qk_nope_head_dim=text.integer("qk_nope_head_dim"),
            qk_rope_head_dim=text.integer("qk_rope_head_dim"),
            v_head_dim=text.integer("v_head_dim"),
            mla_output_gate=self._k3_boolean(text, "mla_use_output_gate"),
            mla_lora_norm_eps=text.positive("mla_lora_norm_eps", default=DEFAULT_LATENT_NORM_EPS),
            kda=self._kda(linear),
            dsa=self._dsa(linear, rms_norm_eps, q_lora_rank),
            moe=self._moe(num_layers),
            intermediate_size=text.integer("intermediate_size"),
            activation=activation,
            situ_beta=beta,
            situ_linear_beta=linear_beta,
            attn_res_block_size=self._attn_res_block_size(),
            quantization=self._quantization(),
            dtype=self._dtype(),
            max_position_embeddings=self._context_length(),
            bos_token_id=self._token_id("bos_token_id", vocab_size),
            eos_token_id=self._token_id("eos_token_id", vocab_size),
            eos_token_ids=self._token_id_list("eos_token_id", vocab_size),
            pad_token_id=self._token_id("pad_token_id", vocab_size),
            num_mtp_layers=text.integer(
                "num_nextn_predict_layers", "num_mtp_layers", minimum=0, default=0
            ),
        )
        self._check_redundant_fields(config)
        self._check_groups(config)
        return config

    def unread(self) -> list[str]:
        sections = [self.top, *([self.text] if self.text is not self.top else []), *self.nested]
        return sorted(name for section in sections for name in section.unread())

    def _nested(self, section: Section) -> Section:
        self.nested.append(section)
        return section

    def _k3_boolean(self, section: Section, name: str) -> bool:
        """A field that K3 must state and that Kimi Linear may leave out (false)."""
        return section.boolean(name) if self.is_k3 else section.boolean(name, default=False)

    def _layer_kinds(self, linear: Section, num_layers: int) -> tuple[LayerKind, ...]:
        kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
        # Lengths first: a huge num_hidden_layers must not allocate anything.
        if len(kda) + len(full) != num_layers or set(kda) | set(full) != set(
            range(1, num_layers + 1)
        ):
            raise linear.fail(
                "kda_layers",
                f"and full_attn_layers do not partition the layers 1..{num_layers}"
                f"{_partition_fault(kda, full, num_layers)}",
                "each layer must be in exactly one of the two lists, counted from 1",
            )
        attention: LayerKind = "dsa" if self.family == "kimi_k3.1" else "mla"
        full_set = set(full)
        return tuple(attention if i + 1 in full_set else "kda" for i in range(num_layers))

    def _kda(self, linear: Section) -> KdaConfig:
        return KdaConfig(
            num_heads=linear.integer("num_heads"),
            head_dim=linear.integer("head_dim"),
            conv_width=linear.integer("short_conv_kernel_size", minimum=2),
            gate_lower_bound=self._gate_lower_bound(linear),
            full_rank_gate=self._k3_boolean(linear, "use_full_rank_gate"),
        )

    def _gate_lower_bound(self, linear: Section) -> float | None:
        if not self.is_k3 and linear.value("gate_lower_bound", default=None) is None:
            return None
        bound = linear.number("gate_lower_bound")
        if bound >= 0:
            raise linear.fail(
                "gate_lower_bound",
                f"is {bound}",
                "the decay is gate_lower_bound * sigmoid(...) and must be negative; K3 has -5.0",
            )
        return bound

    def _dsa(
        self, linear: Section, rms_norm_eps: float, q_lora_rank: int | None
    ) -> DsaConfig | None:
        if self.family != "kimi_k3.1":
            return None
        section = self._nested(self.shared.home("dsa_config").section("dsa_config"))
        full = linear.integers("full_attn_layers")
        names = _DSA_ALIASES["layers"]
        if section.has(*names) and sorted(section.integers(*names)) != sorted(full):
            raise section.fail(
                names[0],
                f"is {list(section.integers(*names))}, but linear_attn_config.full_attn_layers is "
                f"{list(full)}",
                "every full-attention layer of Kimi K3.1 is a DSA layer: make the two lists equal",
            )
        if q_lora_rank is None:
            raise self.text.fail(
                "q_lora_rank",
                "is null or missing, but the indexer reads the query latent",
                "set the rank of the query projection (K3.1-Pro: 1536)",
            )
        return DsaConfig(
            num_heads=section.integer(*_DSA_ALIASES["heads"]),
            head_dim=section.integer(*_DSA_ALIASES["head_dim"]),
            top_k=section.integer(*_DSA_ALIASES["top_k"]),
            norm_eps=section.positive(*_DSA_ALIASES["norm_eps"], default=rms_norm_eps),
        )

    def _moe(self, num_layers: int) -> MoeConfig:
        text = self.text
        num_experts = text.integer("num_experts", "n_routed_experts")
        top_k = text.integer("num_experts_per_token", "num_experts_per_tok")
        if top_k > num_experts:
            raise text.fail(
                "num_experts_per_token",
                f"is {top_k}, but there are only {num_experts} experts",
                "it must be at most num_experts",
            )
        latent = (
            text.integer("routed_expert_hidden_size")
            if self.is_k3
            else text.optional_integer("routed_expert_hidden_size")
        )
        return MoeConfig(
            num_experts=num_experts,
            top_k=top_k,
            num_shared=text.integer("num_shared_experts", "n_shared_experts", minimum=0),
            intermediate_size=text.integer("moe_intermediate_size"),
            latent_size=latent,
            latent_norm=self._k3_boolean(text, "latent_moe_use_norm"),
            renormalize=text.boolean("moe_renormalize", "norm_topk_prob"),
            routed_scaling_factor=text.positive("routed_scaling_factor"),
            first_dense=min(text.integer("first_k_dense_replace", minimum=0), num_layers),
            layer_freq=text.integer("moe_layer_freq", default=1),
        )

    def _activation(self) -> tuple[Activation, float, float | None]:
        name = cast(Activation, self.text.choice("hidden_act", ("silu", "situ")))
        if name == "silu":
            # Harmless leftovers of a shared config class: SiLU has no parameters.
            self.text.used.update(("activation_situ_beta", "activation_situ_linear_beta"))
            return name, 1.0, None
        beta = self.text.positive("activation_situ_beta")
        if self.text.value("activation_situ_linear_beta") is None:
            return name, beta, None
        return name, beta, self.text.positive("activation_situ_linear_beta")

    def _attn_res_block_size(self) -> int | None:
        if self.is_k3:
            return self.text.integer("attn_res_block_size")
        return self.text.optional_integer("attn_res_block_size")

    def _quantization(self) -> Mxfp4Config | None:
        home = self.shared.home("quantization_config")
        section = home.optional_section("quantization_config")
        if section is None:
            return None
        section.choice("quant_method", ("compressed-tensors",))
        section.choice("format", (MXFP4_FORMAT,))
        groups = section.section("config_groups")
        for name in groups.values:
            _check_mxfp4_group(groups.section(name))
        return Mxfp4Config(MXFP4_GROUP, section.texts("ignore", default=[]))

    def _dtype(self) -> WeightType:
        home = self.shared.home("dtype", "torch_dtype")
        name = home.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
        if name not in ("float32", "bfloat16"):
            raise home.fail("dtype", f"is '{name}'", "supported values: float32, bfloat16")
        return cast(WeightType, name)

    def _context_length(self) -> int:
        fallback = self.text.value("model_max_length", default=1 << 20)
        return self.text.integer("max_position_embeddings", default=fallback)

    def _token_id(self, name: str, vocab_size: int) -> int | None:
        ids = self._token_id_list(name, vocab_size)
        return ids[0] if ids else None

    def _token_id_list(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, or a list of them; empty where null or absent."""
        home = self.shared.home(name)
        if isinstance(home.values.get(name), list):
            ids = home.integers(name)
        else:
            one = home.optional_integer(name, minimum=0)
            ids = () if one is None else (one,)
        for value in ids:
            if not 0 <= value < vocab_size:
                raise home.fail(
                    name, f"is {value}", f"it must be within the vocabulary of {vocab_size}"
                )
        return ids

    def _fixed_choices(self, num_heads: int) -> None:
        """What these families have never varied and what is therefore not implemented."""
        text = self.text
        one_group = "these models route over one group of experts"
        text.must_be("num_expert_group", 1, one_group)
        text.must_be("n_group", 1, one_group)
        text.must_be("topk_group", 1, one_group)
        text.must_be("moe_router_activation_func", "sigmoid", "the router scores with a sigmoid")
        text.must_be("scoring_func", "sigmoid", "the router scores with a sigmoid")
        text.must_be("topk_method", "noaux_tc", "the router selects by biased score")
        text.must_be("mla_use_nope", True, "no layer of these families rotates queries or keys")
        text.must_be("attention_bias", False, "projections of these families have no bias")
        text.must_be("num_key_value_heads", num_heads, "it must equal num_attention_heads")
        self.shared.home("tie_word_embeddings").must_be(
            "tie_word_embeddings", False, "ship lm_head.weight as a tensor of its own"
        )
        # With one group, grouped selection is plain selection, so either value means the same.
        text.boolean("use_grouped_topk", default=True)
        text.must_be("rope_scaling", None, "no layer of these families rotates anything; remove it")

    def _check_redundant_fields(self, config: ModelConfig) -> None:
        """Fields that say again what others said: they must agree."""
        kinds = ["linear_attention" if k == "kda" else "full_attention" for k in config.layer_kinds]
        mlps = ["sparse" if config.is_moe_layer(i) else "dense" for i in range(config.num_layers)]
        said_twice: tuple[tuple[str, object, str], ...] = (
            ("layer_types", kinds, "linear_attn_config's layer lists"),
            ("mlp_layer_types", mlps, "first_k_dense_replace and moe_layer_freq"),
            ("qk_head_dim", config.qk_head_dim, "qk_nope_head_dim + qk_rope_head_dim"),
            ("linear_num_heads", config.kda.num_heads, "linear_attn_config.num_heads"),
            ("linear_head_dim", config.kda.head_dim, "linear_attn_config.head_dim"),
            ("linear_conv_kernel_dim", config.kda.conv_width, "short_conv_kernel_size"),
        )
        for name, expected, source in said_twice:
            value = self.text.value(name, default=None)
            if value is not None and value != expected:
                raise self.text.fail(
                    name,
                    f"is {value!r:.100}, which contradicts {source} ({expected!r:.100})",
                    "remove it or make the two agree",
                )

    def _check_groups(self, config: ModelConfig) -> None:
        if config.quantization is None:
            return
        widths = {
            "moe_intermediate_size": config.moe.intermediate_size,
            "routed_expert_hidden_size"
            if config.moe.latent_size
            else "hidden_size": config.expert_size,
        }
        for name, width in widths.items():
            if width % MXFP4_GROUP:
                raise self.text.fail(
                    name,
                    f"is {width}, which MXFP4 groups of {MXFP4_GROUP} do not divide",
                    f"use a multiple of {MXFP4_GROUP}, or unquantised experts",
                )


def _partition_fault(kda: tuple[int, ...], full: tuple[int, ...], num_layers: int) -> str:
    """The first layer that is out of range, listed twice or left out."""
    seen: set[int] = set()
    for layer in (*kda, *full):
        if not 1 <= layer <= num_layers:
            return f" (layer {layer} does not exist)"
        if layer in seen:
            return f" (layer {layer} is listed twice)"
        seen.add(layer)
    # One of the first len(seen) + 1 layers is missing, however large num_layers is.
    missing = next(layer for layer in range(1, len(seen) + 2) if layer not in seen)
    return f" (layer {missing} is in neither)"


def _check_mxfp4_group(group: Section) -> None:
    weights = group.section("weights")
    expected: tuple[tuple[str, object], ...] = (
        ("num_bits", 4),
        ("type", "float"),
        ("group_size", MXFP4_GROUP),
        ("strategy", "group"),
        ("symmetric", True),
    )
    for name, value in expected:
        weights.must_be(name, value, "routed experts are read as MXFP4 (E2M1, one scale per 32)")
    if group.has("input_activations"):
        raise group.fail(
            "input_activations", "is given", "only weight-only MXFP4 is supported; remove it"
        )
