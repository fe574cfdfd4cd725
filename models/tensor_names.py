"""The tensors of a published checkpoint, and how the model's parameters are made from them.

Two tables for a config, both generated lazily because a full Kimi K3.1 has half a million tensors:

- `published_tensors`: name, shape, storage class and role of every tensor in the files;
- `weight_sources`: name, shape and recipe of every parameter of the model. A parameter carries its
  tensor's name (without `language_model.`), except where several tensors make one parameter: routed
  experts are stacked, the three convolutions of a KDA layer are one weight. A_log is cut to its
  heads.

Every recipe is the same operation on flat memory: the tensors laid one after the other, and the
front of that taken. So a reader needs no case per recipe, and a file can be written by appending.

Names and shapes: the published checkpoints of Kimi Linear, K3 and K3.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, overload

from hybridge.models.config import KdaConfig, ModelConfig

Storage = Literal["weight", "float32", "uint8"]
Role = Literal[
    "embedding",
    "projection",
    "norm",
    "norm_bias",
    "conv",
    "decay_rate",
    "decay_bias",
    "router",
    "router_bias",
    "residual_query",
    "expert",
    "expert_packed",
    "expert_scale",
]
Transform = Literal["as_is", "stack_experts", "concat", "slice_flat"]

K3_PREFIX: Final = "language_model."
SKIPPED_PREFIXES: Final = ("vision_tower.", "mm_projector.")
A_LOG_SLOTS: Final = 128  # K3 stores this many values of A_log, whatever the number of heads
_EXPERT_TENSORS: Final = ("w1", "w2", "w3")
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")
# transformers saves the dense MLP of Kimi Linear under the name of the experts it stands in for.
_DENSE_ALIAS: Final = re.compile(
    r"(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)"
)


class PublishedTensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: as published, with the family's prefix.
        shape: as published.
        storage: "weight" (the config's dtype), "float32" or "uint8" (packed MXFP4 and its scales).
        role: what the tensor is, from which random weights get their scale.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    role: Role


@dataclass(frozen=True)
class ExpertNames(Sequence[str]):
    """Names of the same tensors of all experts of a layer, made on demand.

    Attributes:
        layer: model.layers.N of the layer.
        num_experts: experts in the layer.
        parts: the expert's tensors in order, as "w1.weight".
    """

    layer: str
    num_experts: int
    parts: tuple[str, ...]

    def __len__(self) -> int:
        return self.num_experts * len(self.parts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        expert, part = divmod(index % len(self), len(self.parts))
        return f"{self.layer}.block_sparse_moe.experts.{expert}.{self.parts[part]}"


@dataclass(frozen=True)
class WeightSource:
    """How one parameter of the model comes from the checkpoint.

    Attributes:
        name: the parameter's name in the model.
        shape: the parameter's shape.
        dtype: "float32", "bfloat16" or "uint8", by the config; a checkpoint may hold the other
            float type.
        transform: "as_is": the bytes of the one tensor, so that a compiler can refer to them in
            place. "stack_experts", "concat": the tensors laid one after the other. "slice_flat":
            the front of the one tensor.
        tensors: the tensors it is made of, in order, without `language_model.`.
        storage: storage class of the tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    transform: Transform
    tensors: Sequence[str]
    storage: Storage

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def plain_name(name: str) -> str:
    """A tensor's name as the model has it: no `language_model.`, the dense MLP under `mlp`."""
    name = name.removeprefix(K3_PREFIX)
    alias = _DENSE_ALIAS.fullmatch(name)
    return f"{alias[1]}.mlp.{alias[2]}" if alias else name


def is_skipped(name: str, config: ModelConfig) -> bool:
    """Whether a tensor, by its plain name, is no part of the text model: vision or an MTP layer."""
    if name.startswith(SKIPPED_PREFIXES):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= config.num_layers


def name_prefix(config: ModelConfig) -> str:
    """What the published names of this family start with, before `model.` or `lm_head.`."""
    return "" if config.family == "kimi_linear" else K3_PREFIX


def published_tensors(config: ModelConfig) -> Iterator[PublishedTensor]:
    """All tensors of a checkpoint of this config, layer by layer."""
    prefix = name_prefix(config)
    for tensor in _plain_tensors(config):
        yield tensor._replace(name=prefix + tensor.name)


def weight_sources(config: ModelConfig) -> Iterator[WeightSource]:
    """All parameters of the model, layer by layer, with their recipes."""
    yield from (_as_is(config, tensor) for tensor in _leading(config))
    for layer in range(config.num_layers):
        yield from _layer_sources(config, layer)
    yield from (_as_is(config, tensor) for tensor in _trailing(config))


def parameter_count(config: ModelConfig) -> int:
    """Number of weights, each MXFP4 value counted as one and scales not at all."""
    dense = sum(
        math.prod(t.shape)
        for layer in range(config.num_layers)
        for t in _trunk_tensors(config, layer)
    )
    ends = sum(math.prod(t.shape) for t in (*_leading(config), *_trailing(config)))
    moe = config.moe
    expert = 3 * moe.intermediate_size * config.expert_size
    return dense + ends + len(config.moe_layers) * moe.num_experts * expert


def _plain_tensors(config: ModelConfig) -> Iterator[PublishedTensor]:
    yield from _leading(config)
    for layer in range(config.num_layers):
        yield from _trunk_tensors(config, layer)
        yield from _expert_tensors(config, layer)
    yield from _trailing(config)


def _leading(config: ModelConfig) -> Iterator[PublishedTensor]:
    shape = (config.vocab_size, config.hidden_size)
    yield PublishedTensor("model.embed_tokens.weight", shape, "weight", "embedding")


def _trailing(config: ModelConfig) -> Iterator[PublishedTensor]:
    if config.attn_res_block_size is not None:
        yield from _residual_mix("model.output_attn_res", config.hidden_size)
    yield _norm("model.norm.weight", config.hidden_size)
    yield _linear("lm_head.weight", config.vocab_size, config.hidden_size)


def _linear(name: str, rows: int, columns: int) -> PublishedTensor:
    return PublishedTensor(name, (rows, columns), "weight", "projection")


def _norm(name: str, size: int) -> PublishedTensor:
    return PublishedTensor(name, (size,), "weight", "norm")


def _residual_mix(site: str, hidden: int) -> Iterator[PublishedTensor]:
    """The norm weight and the pseudo-query of one Attention Residuals site."""
    yield _norm(f"{site}_norm.weight", hidden)
    yield PublishedTensor(f"{site}_proj.weight", (1, hidden), "weight", "residual_query")


def _trunk_tensors(config: ModelConfig, layer: int) -> Iterator[PublishedTensor]:
    """A layer's tensors but for the routed experts."""
    prefix = f"model.layers.{layer}"
    hidden = config.hidden_size
    yield _norm(f"{prefix}.input_layernorm.weight", hidden)
    if config.layer_kinds[layer] == "kda":
        yield from _kda_tensors(config, f"{prefix}.self_attn")
    else:
        yield from _attention_tensors(config, f"{prefix}.self_attn")
    yield _norm(f"{prefix}.post_attention_layernorm.weight", hidden)
    if config.attn_res_block_size is not None:
        yield from _residual_mix(f"{prefix}.self_attention_res", hidden)
        yield from _residual_mix(f"{prefix}.mlp_res", hidden)
    if config.is_moe_layer(layer):
        yield from _moe_tensors(config, f"{prefix}.block_sparse_moe")
    else:
        yield from _mlp_tensors(f"{prefix}.mlp", config.intermediate_size, hidden)


def _mlp_tensors(prefix: str, width: int, hidden: int) -> Iterator[PublishedTensor]:
    yield _linear(f"{prefix}.gate_proj.weight", width, hidden)
    yield _linear(f"{prefix}.up_proj.weight", width, hidden)
    yield _linear(f"{prefix}.down_proj.weight", hidden, width)


def _kda_tensors(config: ModelConfig, prefix: str) -> Iterator[PublishedTensor]:
    kda, hidden = config.kda, config.hidden_size
    size, rank = kda.projection_size, kda.gate_rank
    for part in "qkv":
        yield _linear(f"{prefix}.{part}_proj.weight", size, hidden)
    for part in "qkv":
        shape = (size, 1, kda.conv_width)
        yield PublishedTensor(f"{prefix}.{part}_conv1d.weight", shape, "float32", "conv")
    yield PublishedTensor(f"{prefix}.A_log", _a_log_shape(config), "float32", "decay_rate")
    yield PublishedTensor(f"{prefix}.dt_bias", (size,), "float32", "decay_bias")
    yield _linear(f"{prefix}.f_a_proj.weight", rank, hidden)
    yield _linear(f"{prefix}.f_b_proj.weight", size, rank)
    yield _linear(f"{prefix}.b_proj.weight", kda.num_heads, hidden)
    yield from _kda_output_gate(kda, hidden, prefix)
    yield _norm(f"{prefix}.o_norm.weight", kda.head_dim)
    yield _linear(f"{prefix}.o_proj.weight", hidden, size)


def _kda_output_gate(kda: KdaConfig, hidden: int, prefix: str) -> Iterator[PublishedTensor]:
    if kda.full_rank_gate:
        yield _linear(f"{prefix}.g_proj.weight", kda.projection_size, hidden)
    else:
        yield _linear(f"{prefix}.g_a_proj.weight", kda.gate_rank, hidden)
        yield _linear(f"{prefix}.g_b_proj.weight", kda.projection_size, kda.gate_rank)


def _a_log_shape(config: ModelConfig) -> tuple[int, ...]:
    heads = config.kda.num_heads
    return (1, 1, heads, 1) if config.family == "kimi_linear" else (max(A_LOG_SLOTS, heads),)


def _attention_tensors(config: ModelConfig, prefix: str) -> Iterator[PublishedTensor]:
    hidden, heads, latent = config.hidden_size, config.num_heads, config.kv_lora_rank
    if config.q_lora_rank is None:
        yield _linear(f"{prefix}.q_proj.weight", heads * config.qk_head_dim, hidden)
    else:
        yield _linear(f"{prefix}.q_a_proj.weight", config.q_lora_rank, hidden)
        yield _norm(f"{prefix}.q_a_layernorm.weight", config.q_lora_rank)
        yield _linear(f"{prefix}.q_b_proj.weight", heads * config.qk_head_dim, config.q_lora_rank)
    yield _linear(f"{prefix}.kv_a_proj_with_mqa.weight", config.latent_size_per_token, hidden)
    yield _norm(f"{prefix}.kv_a_layernorm.weight", latent)
    up_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield _linear(f"{prefix}.kv_b_proj.weight", up_rows, latent)
    if config.mla_output_gate:
        yield _linear(f"{prefix}.g_proj.weight", heads * config.v_head_dim, hidden)
    yield _linear(f"{prefix}.o_proj.weight", hidden, heads * config.v_head_dim)
    if config.dsa is not None:
        yield from _indexer_tensors(config, f"{prefix}.indexer")


def _indexer_tensors(config: ModelConfig, prefix: str) -> Iterator[PublishedTensor]:
    dsa, hidden = config.dsa, config.hidden_size
    assert dsa is not None
    assert config.q_lora_rank is not None
    yield _linear(f"{prefix}.wq_b.weight", dsa.num_heads * dsa.head_dim, config.q_lora_rank)
    yield _linear(f"{prefix}.wk.weight", dsa.head_dim, hidden)
    yield _norm(f"{prefix}.k_norm.weight", dsa.head_dim)
    yield PublishedTensor(f"{prefix}.k_norm.bias", (dsa.head_dim,), "weight", "norm_bias")
    yield _linear(f"{prefix}.weights_proj.weight", dsa.num_heads, hidden)


def _moe_tensors(config: ModelConfig, prefix: str) -> Iterator[PublishedTensor]:
    moe, hidden = config.moe, config.hidden_size
    gate = f"{prefix}.gate"
    yield PublishedTensor(f"{gate}.weight", (moe.num_experts, hidden), "weight", "router")
    bias = f"{gate}.e_score_correction_bias"
    yield PublishedTensor(bias, (moe.num_experts,), "float32", "router_bias")
    if moe.latent_size is not None:
        yield _linear(f"{prefix}.routed_expert_down_proj.weight", moe.latent_size, hidden)
        yield _linear(f"{prefix}.routed_expert_up_proj.weight", hidden, moe.latent_size)
    if moe.latent_norm:
        yield _norm(f"{prefix}.routed_expert_norm.weight", config.expert_size)
    if moe.num_shared:
        yield from _mlp_tensors(f"{prefix}.shared_experts", moe.shared_size, hidden)


def _expert_tensors(config: ModelConfig, layer: int) -> Iterator[PublishedTensor]:
    """The routed experts of a layer, expert by expert; nothing in a dense layer."""
    if not config.is_moe_layer(layer):
        return
    shapes = [
        (suffix, shape, storage, role)
        for part in _EXPERT_TENSORS
        for suffix, shape, storage, role in _expert_parts(config, part)
    ]
    prefix = f"model.layers.{layer}.block_sparse_moe.experts"
    for expert in range(config.moe.num_experts):
        for suffix, shape, storage, role in shapes:
            yield PublishedTensor(f"{prefix}.{expert}.{suffix}", shape, storage, role)


def _expert_parts(
    config: ModelConfig, part: str
) -> Iterator[tuple[str, tuple[int, int], Storage, Role]]:
    rows, columns = config.moe.intermediate_size, config.expert_size
    if part == "w2":
        rows, columns = columns, rows
    if config.quantization is None:
        yield f"{part}.weight", (rows, columns), "weight", "expert"
        return
    group = config.quantization.group_size
    yield f"{part}.weight_packed", (rows, columns // 2), "uint8", "expert_packed"
    yield f"{part}.weight_scale", (rows, columns // group), "uint8", "expert_scale"


def _layer_sources(config: ModelConfig, layer: int) -> Iterator[WeightSource]:
    for tensor in _trunk_tensors(config, layer):
        if tensor.role == "decay_rate":
            yield _source(config, tensor, (config.kda.num_heads,), "slice_flat", (tensor.name,))
        elif tensor.role != "conv":
            yield _as_is(config, tensor)
        elif tensor.name.endswith("q_conv1d.weight"):
            yield _conv_source(config, tensor)
    if config.is_moe_layer(layer):
        yield from _expert_sources(config, f"model.layers.{layer}")


def _as_is(config: ModelConfig, tensor: PublishedTensor) -> WeightSource:
    return _source(config, tensor, tensor.shape, "as_is", (tensor.name,))


def _source(
    config: ModelConfig,
    tensor: PublishedTensor,
    shape: tuple[int, ...],
    transform: Transform,
    tensors: Sequence[str],
) -> WeightSource:
    dtype = dtype_name(config, tensor.storage)
    return WeightSource(tensor.name, shape, dtype, transform, tensors, tensor.storage)


def dtype_name(config: ModelConfig, storage: Storage) -> str:
    """The dtype that a storage class stands for in this config."""
    return config.dtype if storage == "weight" else storage


def _conv_source(config: ModelConfig, query: PublishedTensor) -> WeightSource:
    """The convolutions of q, k and v as one weight [3P, W], in that order."""
    layer = query.name.removesuffix("q_conv1d.weight")
    return WeightSource(
        name=f"{layer}conv_weight",
        shape=(3 * config.projection_size, config.kda.conv_width),
        dtype=dtype_name(config, query.storage),
        transform="concat",
        tensors=tuple(f"{layer}{part}_conv1d.weight" for part in "qkv"),
        storage=query.storage,
    )


def _expert_sources(config: ModelConfig, layer: str) -> Iterator[WeightSource]:
    """gate_up [E, 2I, L] (an expert's w1 rows, then its w3 rows) and down [E, L, I]."""
    experts = config.moe.num_experts
    inner, outer = config.moe.intermediate_size, config.expert_size
    for name, parts, rows, columns in (
        ("gate_up", ("w1", "w3"), 2 * inner, outer),
        ("down", ("w2",), outer, inner),
    ):
        for kind, divisor, storage in _expert_storage(config):
            suffix = f"weight_{kind}" if kind else "weight"
            yield WeightSource(
                name=f"{layer}.block_sparse_moe.experts.{name}{'_' if kind else ''}{kind}",
                shape=(experts, rows, columns // divisor),
                dtype=dtype_name(config, storage),
                transform="stack_experts",
                tensors=ExpertNames(layer, experts, tuple(f"{part}.{suffix}" for part in parts)),
                storage=storage,
            )


def _expert_storage(config: ModelConfig) -> tuple[tuple[str, int, Storage], ...]:
    """What an expert's matrix is stored as: name suffix, divisor of the columns, storage class."""
    if config.quantization is None:
        return (("", 1, "weight"),)
    return (("packed", 2, "uint8"), ("scale", config.quantization.group_size, "uint8"))
