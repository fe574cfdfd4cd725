"""The npu operators as torch ops, without their native library: schemas, shapes, CPU references.

Schemas come from `npu_schemas.txt` (the wheel's own) and `own_operators.py`. Every operator that a
lowering emits has a fake kernel here, so that graphs of them can be traced on any machine, and a
CPU kernel from `npu_reference`, so that they can be run. Where the real torch_npu is loaded, its
operators are there already and are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend import npu_reference
from hybridge.compiler.targets.ascend.own_operators import OWN_OPERATORS, PAGED_MLA_ATTENTION

OWN_NAMESPACE = "hybridge_ascend"
_KEEP: list[torch.library.Library] = []  # a library's ops live as long as it does


def read_schemas() -> tuple[str, ...]:
    """The npu schemas of the data file, each without its namespace."""
    text = resources.files(__package__).joinpath("npu_schemas.txt").read_text("utf-8")
    return tuple(line for line in text.splitlines() if line and not line.startswith("#"))


@cache
def define_operators() -> None:
    """Define what is not defined yet, once a process."""
    own = [f"{op.name}{op.signature}" for op in OWN_OPERATORS.values()]
    _define("npu", read_schemas())
    _define(OWN_NAMESPACE, (*own, PAGED_MLA_ATTENTION))


def _define(namespace: str, schemas: tuple[str, ...]) -> None:
    library = torch.library.Library(namespace, "FRAGMENT")
    _KEEP.append(library)
    for schema in schemas:
        name = schema.split("(", 1)[0]
        packet = getattr(torch.ops, namespace)
        if hasattr(packet, name.split(".")[0]) and "." not in name:
            continue
        library.define(schema)
        qualified = f"{namespace}::{name}"
        if qualified in FAKES:
            library.impl(name, FAKES[qualified], "Meta")
        if qualified in npu_reference.REFERENCES:
            library.impl(name, npu_reference.REFERENCES[qualified], "CPU")


def _like_first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _rms_norm(x1, gamma)
    return y, rstd, torch.empty_like(x1)


def _lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, sparse_count: int = 2048, **_: Any
) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], key.shape[2], sparse_count)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(0)


def _sparse_flash_attention(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    none = query.new_empty(0, dtype=torch.float32)
    return torch.empty_like(query), none, none.clone()


def _recurrent(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(value)


def _mla_prolog(
    x: Tensor,
    _1: Tensor,
    _2: Tensor,
    weight_uk: Tensor,
    _4: Tensor,
    gamma: Tensor,
    _6: Tensor,
    rope_sin: Tensor,
    *_: Any,
    query_norm_flag: bool = False,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, heads = x.shape[0], weight_uk.shape[0]
    nothing = x.new_empty(0, dtype=torch.float32)
    normed = x.new_empty((tokens, gamma.shape[0])) if query_norm_flag else x.new_empty(0)
    query = x.new_empty((tokens, heads, weight_uk.shape[2]))
    rope = x.new_empty((tokens, heads, rope_sin.shape[-1]))
    return query, rope, nothing, normed, nothing.clone()


def _mla_prolog_functional(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    caches = tensors[9:11]
    return (*_mla_prolog(*tensors, **options), *(torch.empty_like(cache) for cache in caches))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _scatter_functional(
    _1: Tensor, _2: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(key_cache), torch.empty_like(value_cache)


def _dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    quant_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    local = moe_expert_num // ep_world_size
    count = x.shape[0] * ep_world_size * min(local, expert_ids.shape[1])
    rows = x.new_empty((count, x.shape[1]))
    scales = x.new_empty(count, dtype=torch.float32)
    if quant_mode == 4:
        rows = rows.to(torch.float8_e4m3fn)
        width = (math.ceil(x.shape[1] / 32) + 1) // 2 * 2
        scales = x.new_empty((count, width), dtype=torch.uint8)
    return (
        rows,
        scales,
        x.new_empty(max(expert_ids.numel(), count * 128), dtype=torch.int32),
        x.new_empty(local, dtype=torch.int64),
        x.new_empty(ep_world_size * local, dtype=torch.int32),
        x.new_empty(0, dtype=torch.int32),
        x.new_empty(0, dtype=torch.float32),
    )


def _combine(expand_x: Tensor, expert_ids: Tensor, *_: Any, **__: Any) -> Tensor:
    return expand_x.new_empty((expert_ids.shape[0], expand_x.shape[1]))


def _halved(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _gating(x: Tensor, k: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], k)
    scores = x.new_empty(x.shape, dtype=torch.float32)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), scores


def _init_routing(
    x: Tensor, expert_idx: Tensor, *, expert_num: int = -1, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = expert_idx.shape[0] * expert_idx.shape[1]
    return (
        x.new_empty((pairs, x.shape[1])),
        x.new_empty(pairs, dtype=torch.int32),
        x.new_empty(expert_num, dtype=torch.int64),
        x.new_empty(pairs, dtype=torch.float32),
    )


def _finalize(expanded: Tensor, _1: Any, _2: Any, _3: Any, scales: Tensor, *_: Any) -> Tensor:
    return expanded.new_empty((scales.shape[0], expanded.shape[1]))


def _mx_quant(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((*x.shape[:-1], math.ceil(x.shape[-1] / 64), 2), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


def _grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, antiquant_scale: Any = None, **_: Any
) -> list[Tensor]:
    dtype = x[0].dtype if antiquant_scale is None else torch.bfloat16
    return [x[0].new_empty((x[0].shape[0], weight[0].shape[2]), dtype=dtype)]


def _chunk_kda(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(rest[4])


def _prepare(
    block_res: Tensor, valid_blocks: Tensor, pseudo_query: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = block_res.new_empty((pseudo_query.shape[0], block_res.shape[0]))
    numerator = block_res.new_empty((*statistics.shape, block_res.shape[2]))
    return numerator, statistics, statistics.clone()


def _update(partial_block: Tensor, delta: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(partial_block), torch.empty_like(delta)


def _returns_its_input(x: Tensor, *_: Any) -> Tensor:
    return x


FAKES: dict[str, Callable[..., Any]] = {
    "npu::npu_rms_norm": _rms_norm,
    "npu::npu_add_rms_norm": _add_rms_norm,
    "npu::npu_scatter_nd_update_": _returns_its_input,
    "npu::npu_lightning_indexer": _lightning_indexer,
    "npu::npu_sparse_flash_attention": _sparse_flash_attention,
    "npu::npu_recurrent_gated_delta_rule": _recurrent,
    "npu::npu_mla_prolog_v3": _mla_prolog,
    "npu::npu_mla_prolog_v3_functional": _mla_prolog_functional,
    "npu::npu_scatter_pa_kv_cache": _nothing,
    "npu::npu_scatter_pa_kv_cache_functional": _scatter_functional,
    "npu::npu_moe_distribute_dispatch_v2": _dispatch,
    "npu::npu_moe_distribute_combine_v2": _combine,
    "npu::npu_swiglu": _halved,
    "npu::npu_moe_gating_top_k": _gating,
    "npu::npu_moe_init_routing_v2": _init_routing,
    "npu::npu_moe_finalize_routing": _finalize,
    "npu::npu_dynamic_mx_quant": _mx_quant,
    "npu::npu_grouped_matmul": _grouped_matmul,
    "hybridge_ascend::paged_mla_attention": _like_first,
    "hybridge_ascend::chunk_kda_fwd": _chunk_kda,
    "hybridge_ascend::causal_conv1d": _like_first,
    "hybridge_ascend::block_attn_res_prepare": _prepare,
    "hybridge_ascend::block_attn_res_update": _update,
    "hybridge_ascend::situ_glu": _halved,
}
