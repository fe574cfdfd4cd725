"""The configuration of a Kimi Linear, K3 or K3.1 model, read from its published config.json.

The published layer lists count from 1; here everything counts from 0. What the published configs
leave open (norm epsilons of the latents and of the indexer) are fields with stated defaults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, cast

from hybridge.artifacts.errors import CheckpointError
from hybridge.models.config_section import Section, kind_of

Family = Literal["kimi_linear", "kimi_k3", "kimi_k3.1"]
LayerKind = Literal["kda", "mla", "dsa"]
Activation = Literal["silu", "situ"]
WeightType = Literal["float32", "bfloat16"]
ResidualSite = Literal["attention", "ffn", "output"]

CONFIG_FILE: Final = "config.json"
MXFP4_FORMAT: Final = "mxfp4-pack-quantized"
MXFP4_GROUP: Final = 32
DEFAULT_LATENT_NORM_EPS: Final = 1e-6
_MAX_CONFIG_BYTES: Final = 16 << 20

_ARCHITECTURES: Final[dict[str, Family]] = {
    "KimiLinearForCausalLM": "kimi_linear",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "KimiK3ForCausalLM": "kimi_k3",
    "KimiK31ForConditionalGeneration": "kimi_k3.1",
    "KimiK31ForCausalLM": "kimi_k3.1",
}
_MODEL_TYPES: Final[dict[str, Family]] = {
    "kimi_linear": "kimi_linear",
    "kimi_k3": "kimi_k3",
    "kimi_k31": "kimi_k3.1",
    "kimi_k3_1": "kimi_k3.1",
    "kimi_k3.1": "kimi_k3.1",
}
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


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention.

    Attributes:
        num_heads: heads H.
        head_dim: size K = V of a head's keys and values.
        conv_width: taps W of the causal convolution; the cache holds W - 1 columns.
        gate_lower_bound: L of the decay gate L * sigmoid(exp(A) z); None: -exp(A) * softplus(z).
        full_rank_gate: output gate is one `g_proj`; otherwise `g_b_proj(g_a_proj(x))`.
    """

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    full_rank_gate: bool

    @property
    def projection_size(self) -> int:
        """P = H * K, the width of the q, k and v projections."""
        return self.num_heads * self.head_dim

    @property
    def gate_rank(self) -> int:
        """Rank of the decay gate (and of a low-rank output gate): the head size."""
        return self.head_dim


@dataclass(frozen=True)
class DsaConfig:
    """The Lightning Indexer of the sparse attention layers.

    Attributes:
        num_heads: indexer heads.
        head_dim: size of an indexer head, and of a row of the indexer cache.
        top_k: keys that a query keeps.
        norm_eps: epsilon of the key LayerNorm. Published configs leave it out; rms_norm_eps then.
    """

    num_heads: int
    head_dim: int
    top_k: int
    norm_eps: float


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts.

    Attributes:
        num_experts: routed experts E.
        top_k: experts a token visits.
        num_shared: shared experts; they form one MLP of width num_shared * intermediate_size.
        intermediate_size: width I of one expert.
        latent_size: L, the width the experts read and write; None means the hidden size.
        latent_norm: RMSNorm after the weighted sum, in the latent space.
        renormalize: divide the chosen weights by their sum.
        routed_scaling_factor: multiplies the routing weights.
        first_dense: leading layers with a dense MLP.
        layer_freq: of the later layers, those divisible by this have experts.
        has_bias: the router selects by score + e_score_correction_bias (so in all families).
    """

    num_experts: int
    top_k: int
    num_shared: int
    intermediate_size: int
    latent_size: int | None
    latent_norm: bool
    renormalize: bool
    routed_scaling_factor: float
    first_dense: int
    layer_freq: int
    has_bias: bool = True

    @property
    def shared_size(self) -> int:
        """Width of the one MLP that the shared experts form; 0 without shared experts."""
        return self.num_shared * self.intermediate_size


@dataclass(frozen=True)
class Mxfp4Config:
    """Routed experts as compressed-tensors `mxfp4-pack-quantized`: E2M1, one E8M0 scale a group."""

    group_size: int = MXFP4_GROUP
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """All that decides a model's graph and tensors. Layers count from 0.

    Attributes:
        family: "kimi_linear", "kimi_k3" or "kimi_k3.1".
        layer_kinds: one of "kda", "mla", "dsa" a layer.
        num_heads: heads of the full-attention layers.
        q_lora_rank: rank of the query projection; None means one full `q_proj`.
        qk_rope_head_dim: the key columns shared by all heads; never rotated (NoPE), always there.
        mla_output_gate: attention output is multiplied by sigmoid(g_proj x).
        mla_lora_norm_eps: epsilon of the latent norms; not published, 1e-6 where absent.
        intermediate_size: width of the dense MLP.
        activation: "silu" (SwiGLU) or "situ", which takes `situ_beta` and `situ_linear_beta`.
        attn_res_block_size: decoder layers in an Attention Residuals block; None: plain residuals.
        quantization: MXFP4 routed experts, or None.
        dtype: type of the unquantised weights.
        eos_token_id: the first end-of-sequence id; `eos_token_ids` holds all.
        num_mtp_layers: multi-token-prediction layers a checkpoint may hold; they are skipped.
        unknown_fields: dotted names of the config's fields that nothing here knows, to be reported.
        raw: the parsed JSON as it was read; no part of equality or of the digest.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_kinds: tuple[LayerKind, ...]
    rms_norm_eps: float
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    mla_lora_norm_eps: float
    kda: KdaConfig
    dsa: DsaConfig | None
    moe: MoeConfig
    intermediate_size: int
    activation: Activation
    situ_beta: float
    situ_linear_beta: float | None
    attn_res_block_size: int | None
    quantization: Mxfp4Config | None
    dtype: WeightType
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_mtp_layers: int = 0
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)
    raw: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def projection_size(self) -> int:
        """P, the width of KDA's q, k and v projections."""
        return self.kda.projection_size

    @property
    def qk_head_dim(self) -> int:
        """Size of a full-attention query or key head: nope + rope columns."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size_per_token(self) -> int:
        """Width of a row of the latent cache: kv_lora + rope columns."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(nope + rope) ** -0.5; the unrotated rope columns count."""
        return float(self.qk_head_dim**-0.5)

    @property
    def expert_size(self) -> int:
        """Width that a routed expert reads and writes: the latent, or else the hidden size."""
        return self.moe.latent_size or self.hidden_size

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        """Indices of the MLA or DSA layers."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind != "kda")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts."""
        return tuple(i for i in range(self.num_layers) if self.is_moe_layer(i))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has routed experts rather than a dense MLP."""
        return layer >= self.moe.first_dense and layer % self.moe.layer_freq == 0

    def attn_res_blocks_at(self, layer: int, site: ResidualSite) -> int:
        """Stored blocks that a mix sees, beside the running prefix (one source more).

        The attention site of layer l sees ceil(l / B), its FFN site floor(l / B) + 1 because the
        entering prefix was stored in between, and the output site ceil(num_layers / B), whatever
        `layer`.
        Without Attention Residuals: 0.
        """
        block = self.attn_res_block_size
        if block is None:
            return 0
        if site == "output":
            return -(-self.num_layers // block)
        return layer // block + 1 if site == "ffn" else -(-layer // block)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of `canonical_json`; two spellings of one model have one digest."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def canonical_json(self) -> str:
        """The deciding fields as JSON with sorted keys and no spaces."""
        values = dataclasses.asdict(self)
        del values["raw"], values["unknown_fields"]
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def to_published(self) -> dict[str, object]:
        """The config in the published format; `config_from_dict` of it gives an equal config."""
        return _published(self)


def load_config(path: str | Path) -> ModelConfig:
    """Read a model's configuration.

    Args:
        path: a checkpoint folder, or a config.json itself.

    Raises:
        CheckpointError: the file is missing or no JSON, or a field is missing, of a wrong type, not
            supported, or contradicts another one.
    """
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG_FILE
    return config_from_dict(_read_json(file), source=str(file))


def config_from_dict(raw: Mapping[str, object], source: str = CONFIG_FILE) -> ModelConfig:
    """Read a configuration from parsed JSON: top-level fields, or nested in `text_config`.

    Args:
        raw: the parsed config.json.
        source: the file's name, for messages.

    Raises:
        CheckpointError: as `load_config`.
    """
    top = Section(raw, source)
    text = top.optional_section("text_config") or top
    shared = _SharedFields(top, text)
    family = _family(top, text, shared)
    reader = _Reader(top, text, shared, family)
    config = reader.config()
    unknown = tuple(name for name in reader.unread() if name.rpartition(".")[2] not in _IGNORED)
    return dataclasses.replace(config, unknown_fields=unknown, raw=dict(raw))


def _read_json(file: Path) -> Mapping[str, object]:
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{file}: larger than 16 MiB", "is this the model's config.json?")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror or error})",
            "give a checkpoint folder that holds config.json, or the file itself",
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{file}: is not UTF-8 text ({error.reason})", _JSON_REMEDY
        ) from error
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error})", _JSON_REMEDY) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: holds {kind_of(values)}, not an object", _JSON_REMEDY)
    return values


_JSON_REMEDY: Final = "replace it with the model's published config.json"


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field '{twice}' is given twice")
    return values


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


class _SharedFields:
    """Fields that published configs put at the top level, in text_config, or in both."""

    def __init__(self, top: Section, text: Section) -> None:
        self.top = top
        self.text = text

    def home(self, *fields: str) -> Section:
        """The section that holds one of the fields; refuses two that differ."""
        for section in (self.top, self.text):
            section.used.update(fields)
        inner, outer = self.text.has(*fields), self.top.has(*fields)
        if inner and outer and self.top is not self.text:
            one, other = self.top.value(*fields), self.text.value(*fields)
            if one != other:
                raise self.text.fail(
                    fields[0],
                    f"is {other!r:.80}, but the top level says {one!r:.80}",
                    "make the two agree, or keep one",
                )
        return self.text if inner or not outer else self.top


def _family(top: Section, text: Section, shared: _SharedFields) -> Family:
    """The family by architecture, then model type, then the features of a bare text config."""
    declared = _declared_family(top)
    text.used.update(("architectures", "model_type"))
    has_dsa = shared.home("dsa_config").has("dsa_config")
    if declared == "kimi_k3.1" and not has_dsa:
        raise text.fail(
            "dsa_config",
            "is missing, but the architecture is Kimi K3.1",
            "add it (index_n_heads, index_head_dim, index_topk, dsa_layers), or correct "
            "'architectures'",
        )
    if declared == "kimi_k3" and has_dsa and "architectures" in top.values:
        raise text.fail(
            "dsa_config",
            "is given, but the architecture is Kimi K3, which has no sparse attention",
            "correct 'architectures' to KimiK31ForConditionalGeneration, or remove dsa_config",
        )
    if has_dsa:
        return "kimi_k3.1"
    if declared == "kimi_linear" and text.has("attn_res_block_size"):
        return "kimi_k3"  # a K3 text_config on its own calls itself kimi_linear
    return declared


def _declared_family(top: Section) -> Family:
    names = top.texts("architectures", default=[])
    model_type = top.value("model_type", default=None)
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if names:
        raise top.fail(
            "architectures",
            f"is {list(names)}",
            f"supported architectures: {', '.join(sorted(_ARCHITECTURES))}",
        )
    if isinstance(model_type, str) and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    if model_type is None:
        raise top.fail("architectures", "is missing", "add it, or 'model_type'")
    raise top.fail(
        "model_type", f"is {model_type!r}", f"supported types: {', '.join(sorted(_MODEL_TYPES))}"
    )


class _Reader:
    """Reads and cross-checks the fields of one config."""

    def __init__(self, top: Section, text: Section, shared: _SharedFields, family: Family) -> None:
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


def _published(config: ModelConfig) -> dict[str, object]:
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
