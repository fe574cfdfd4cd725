"""What decides a model's graph and tensors: sizes, layer kinds, open choices. No reading, no torch.

Layers count from 0. What the published configs leave open (norm epsilons of the latents and of the
indexer) are fields.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

Family = Literal["kimi_linear", "kimi_k3", "kimi_k3.1"]
LayerKind = Literal["kda", "mla", "dsa"]
Activation = Literal["silu", "situ"]
WeightType = Literal["float32", "bfloat16"]
ResidualSite = Literal["attention", "ffn", "output"]

MXFP4_FORMAT: Final = "mxfp4-pack-quantized"
MXFP4_GROUP: Final = 32


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

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer has a gated MLP: a dense layer, or shared experts."""
        return not self.is_moe_layer(layer) or self.moe.num_shared > 0

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
        from hybridge.models.published_config import published_config  # it builds on this module

        return published_config(self)
