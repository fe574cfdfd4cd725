"""Inputs of every op of the vocabulary: ragged, padded, tied, inactive, with foreign blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridge.ops.packed_rows import pack_rows

BLOCK = 4
# Every row that no op may read holds this, so that reading one shows.
POISON = float("nan")


@dataclass(frozen=True)
class Case:
    op: str
    args: tuple[Tensor | None, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """A batch: tokens a sequence (`new`), tokens before (`context`), the tail of padding tokens."""

    new: tuple[int, ...]
    context: tuple[int, ...]
    padding: int = 0
    inactive: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(self.new) + self.padding

    def query_start(self) -> Tensor:
        return int32([0, *torch.tensor(self.new).cumsum(0).tolist()])

    def context_len(self) -> Tensor:
        return int32(self.context)

    def state_slot(self, slots: int, random: torch.Generator) -> Tensor:
        order = torch.randperm(slots, generator=random)[: len(self.new)].tolist()
        return int32([-1 if row in self.inactive else slot for row, slot in enumerate(order)])


LAYOUTS = {
    "one": Layout((1,), (0,)),
    "decode": Layout((1, 1, 1), (6, 0, 11)),
    "decode-inactive": Layout((1, 1, 1, 1), (3, 8, 5, 2), inactive=(1, 3)),
    "ragged": Layout((5, 1, 9), (0, 13, 4)),
    "empty-sequences": Layout((0, 3, 0, 2, 0), (4, 0, 0, 7, 2)),
    "padded": Layout((2, 7), (9, 0), padding=5),
    "padded-inactive": Layout((3, 4, 2), (1, 0, 6), padding=2, inactive=(0,)),
}


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random)


def paged(
    random: torch.Generator, layout: Layout, width: int, *, fill: Callable[..., Tensor] = normal
) -> tuple[Tensor, Tensor]:
    """A cache [N, BLOCK, 1, width] and its block table; all that no sequence owns is NaN or -7."""
    lengths = [new + before for new, before in zip(layout.new, layout.context, strict=True)]
    needed = [-(-length // BLOCK) for length in lengths]
    ids = torch.randperm(sum(needed) + 2, generator=random)
    cache = torch.full((len(ids), BLOCK, 1, width), POISON)
    table = torch.full((len(needed), max(*needed, 1) + 1), -7, dtype=torch.int32)
    taken = 0
    for row, count in enumerate(needed):
        blocks = ids[taken : taken + count]
        table[row, :count] = blocks.to(torch.int32)
        rows = cache[blocks].flatten(0, 1)
        rows[: lengths[row]] = fill(random, lengths[row], 1, width)
        cache[blocks] = rows.unflatten(0, (count, BLOCK))
        taken += count
    return cache, table


def few_values(random: torch.Generator, *shape: int) -> Tensor:
    """Small integers: exact in any summation order, with many ties."""
    return torch.randint(-1, 2, shape, generator=random).float()


def _batch(layout: Layout) -> tuple[Tensor, Tensor]:
    return layout.query_start(), layout.context_len()


def _indexer(random: torch.Generator, layout: Layout, top_k: int) -> Case:
    cache, table = paged(random, layout, 8, fill=few_values)
    query = few_values(random, layout.tokens, 3, 8)
    head_weights = few_values(random, layout.tokens, 3)
    args = (query, head_weights, cache, *_batch(layout), table)
    return Case("lightning_indexer", args, {"top_k": top_k})


def _dense(random: torch.Generator, layout: Layout) -> Case:
    cache, table = paged(random, layout, 12)
    query = normal(random, layout.tokens, 2, 12)
    args = (query, cache, *_batch(layout), table)
    return Case("mla_attention", args, {"scale": 0.3, "value_dim": 8})


def _sparse(random: torch.Generator, layout: Layout, top_k: int = 5) -> Case:
    indexer = _indexer(random, layout, top_k)
    positions = torch.ops.hybridge.lightning_indexer(*indexer.args, **indexer.attributes)
    positions[: layout.tokens // 3] = -1
    cache, table = paged(random, layout, 12)
    query = normal(random, layout.tokens, 2, 12)
    args = (query, cache, positions, *_batch(layout), table)
    return Case("sparse_flash_attention", args, {"scale": 0.3, "value_dim": 8})


def _recurrence(random: torch.Generator, layout: Layout) -> Case:
    tokens, heads, key, value, slots = layout.tokens, 2, 4, 6, 7
    unit = torch.nn.functional.normalize
    args = (
        unit(normal(random, tokens, heads, key), dim=-1),
        unit(normal(random, tokens, heads, key), dim=-1),
        normal(random, tokens, heads, value),
        -normal(random, tokens, heads, key).abs(),
        torch.sigmoid(normal(random, tokens, heads)),
        normal(random, slots, heads, key, value),
        *_batch(layout),
        layout.state_slot(slots, random),
    )
    return Case("kda_recurrence", args, {})


def _states(random: torch.Generator, heads: int, size: int, taps: int) -> tuple[Tensor, Tensor]:
    slots, projected = 8, 3 * heads * size
    return normal(random, slots, projected, taps - 1), normal(random, slots, heads, size, size)


def _prefill(random: torch.Generator, layout: Layout, lower_bound: float | None) -> Case:
    heads, size, taps = 2, 4, 4
    projected = heads * size
    conv_state, state = _states(random, heads, size, taps)
    args = (
        normal(random, layout.tokens, 3 * projected),
        normal(random, layout.tokens, projected),
        normal(random, layout.tokens, heads),
        normal(random, 3 * projected, taps),
        normal(random, heads),
        normal(random, projected),
        conv_state,
        state,
        *_batch(layout),
        layout.state_slot(8, random),
    )
    return Case("kda_prefill", args, {"lower_bound": lower_bound})


def _decode(
    random: torch.Generator,
    layout: Layout,
    *,
    full_rank: bool,
    bf16: bool,
    size: int = 4,
    hidden: int = 10,
) -> Case:
    heads, taps, rank = 2, 4, 3
    projected = heads * size
    conv_state, state = _states(random, heads, size, taps)
    gate = projected if full_rank else rank
    weights: list[Tensor | None] = [
        normal(random, 3 * projected + rank + heads + gate, hidden),
        normal(random, projected, rank),
        None if full_rank else normal(random, projected, rank),
        normal(random, 3 * projected, taps),
        normal(random, heads),
        normal(random, projected),
        normal(random, size),
        normal(random, hidden, projected),
    ]
    if bf16:
        weights = [None if item is None else item.bfloat16() for item in weights]
    batch = (layout.context_len(), layout.state_slot(8, random))
    args = (normal(random, layout.tokens, hidden), *weights, conv_state, state, *batch)
    lower_bound = -5.0 if full_rank else None
    return Case("kda_decode", args, {"lower_bound": lower_bound, "norm_eps": 1e-5})


def _experts(
    random: torch.Generator, tokens: int, activation: str, linear_beta: float | None, bf16: bool
) -> Case:
    experts, top_k, width, inner = 6, 3, 8, 4
    ids = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(tokens)])
    ids[ids == 2] = ids.flatten()[0]  # expert 2 has no token; a token may name an expert twice
    dtype = torch.bfloat16 if bf16 else torch.float32
    args = (
        normal(random, tokens, width),
        ids.to(torch.int32),
        torch.rand(tokens, top_k, generator=random),
        normal(random, experts, 2 * inner, width).to(dtype),
        normal(random, experts, width, inner).to(dtype),
    )
    attributes = {"activation": activation, "beta": 4.0, "linear_beta": linear_beta}
    return Case("moe_experts", args, attributes)


def _experts_mxfp4(random: torch.Generator, tokens: int, nan_scale: bool = False) -> Case:
    experts, top_k, width, inner = 5, 2, 64, 32

    def codes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random).to(torch.uint8)

    args = (
        normal(random, tokens, width),
        torch.randint(0, experts, (tokens, top_k), generator=random).to(torch.int32),
        torch.rand(tokens, top_k, generator=random),
        codes(0, 256, experts, 2 * inner, width // 2),
        codes(115, 130, experts, 2 * inner, width // 32),
        codes(0, 256, experts, width, inner // 2),
        codes(0, 130, experts, width, inner // 32),
    )
    if nan_scale:
        args[-1][0, 3] = 255
    attributes = {"activation": "situ", "beta": 4.0, "linear_beta": 25.0}
    return Case("moe_experts_mxfp4", args, attributes)


def _packed(random: torch.Generator, *shape: int) -> Tensor:
    """Packed rows of weights with zeros of both signs and a few exceptions, subnormal ones too."""
    words = (normal(random, *shape) / shape[-1] ** 0.5).bfloat16()
    words[..., 3], words[..., 4], words[..., 70] = 0.0, -0.0, 1e-40
    words[..., 0, 5], words[..., 0, 6], words[..., 1, 127] = 3.0, 1e-12, -1e-12
    return torch.from_numpy(pack_rows(words.view(torch.uint16).numpy()))


def _packed_ops(random: torch.Generator) -> dict[str, Case]:
    linear = Case("linear_packed", (normal(random, 3, 2, 128), _packed(random, 5, 128)), {})
    infinite = (torch.ones(2, 128), torch.from_numpy(pack_rows(_infinite_words())))
    plain = _decode(random, LAYOUTS["decode"], full_rank=False, bf16=False, hidden=128, size=64)
    decode = list(plain.args)
    decode[1] = _packed(random, *plain.args[1].shape)
    decode[8] = _packed(random, *plain.args[8].shape)
    experts = _experts(random, 7, "situ", 25.0, False)
    weights = (_packed(random, 6, 256, 128), _packed(random, 6, 128, 128))
    x = normal(random, 7, 128)
    return {
        "linear-packed": linear,
        "linear-packed-infinite": Case("linear_packed", infinite, {}),
        "kda-decode-packed": Case("kda_decode_packed", tuple(decode), plain.attributes),
        "experts-packed": Case(
            "moe_experts_packed", (x, *experts.args[1:3], *weights), experts.attributes
        ),
    }


def _infinite_words() -> np.ndarray:
    words = np.full((3, 128), 0x3F80, np.uint16)
    words[0, 9], words[1, 9] = 0x7F80, 0x7FC0
    return words


def _route(random: torch.Generator, tokens: int, *, ties: bool, renormalize: bool) -> Case:
    fill = few_values if ties else normal
    weight = torch.zeros(9, 5) if ties else fill(random, 9, 5)
    args = (fill(random, tokens, 5), weight, fill(random, 9))
    return Case("moe_route", args, {"top_k": 4, "renormalize": renormalize, "scale": 2.5})


def _writes(random: torch.Generator) -> dict[str, Case]:
    cache = normal(random, 5, BLOCK, 1, 6)
    rows = normal(random, 6, 1, 6)
    state, state_rows = normal(random, 4, 3, 2), normal(random, 3, 3, 2)
    return {
        "paged-write": Case("paged_write", (cache, rows, int32([3, -1, 19, 0, -1, 7])), {}),
        "paged-write-none": Case("paged_write", (cache, rows, int32([-1] * 6)), {}),
        "paged-write-bf16": Case(
            "paged_write", (cache.bfloat16(), rows, int32([3, -1, 19, 0, 1, 7])), {}
        ),
        "state-write": Case("state_write", (state, state_rows, int32([2, -1, 0])), {}),
        "state-write-none": Case("state_write", (state, state_rows, int32([-1, -1, -1])), {}),
    }


def _dense_maths(random: torch.Generator) -> dict[str, Case]:
    large = 1e4
    statistics = torch.ops.hybridge.attn_res_prepare(
        normal(random, 4, 5, 6), normal(random, 3, 6), eps=1e-6
    )
    prefix, query, weight = normal(random, 5, 6), normal(random, 6), normal(random, 6)
    update = (prefix, query, *statistics)
    update_norm = (*update, weight.bfloat16())
    add_update_norm = (prefix, normal(random, 5, 6), query, *statistics, weight)
    narrow = (prefix.bfloat16(), normal(random, 5, 6).bfloat16(), query, *statistics, weight)
    attributes = {"site": 1, "eps": 1e-6}
    normed = {**attributes, "norm_eps": 1e-5}
    return {
        "prepare": Case(
            "attn_res_prepare", (normal(random, 4, 5, 6), normal(random, 3, 6)), {"eps": 1e-6}
        ),
        "prepare-one-source": Case(
            "attn_res_prepare", (normal(random, 1, 5, 6), normal(random, 1, 6)), {"eps": 1e-6}
        ),
        "prepare-large": Case(
            "attn_res_prepare",
            (large * normal(random, 3, 2, 6), large * normal(random, 2, 6)),
            {"eps": 1e-6},
        ),
        "update": Case("attn_res_update", update, attributes),
        "update-norm": Case("attn_res_update_norm", update_norm, normed),
        "add-update-norm": Case("attn_res_add_update_norm", add_update_norm, normed),
        "add-update-norm-bf16": Case("attn_res_add_update_norm", narrow, normed),
        "rms-norm": Case("rms_norm", (normal(random, 3, 2, 8), normal(random, 8)), {"eps": 1e-5}),
        "rms-norm-bf16-weight": Case(
            "rms_norm", (large * normal(random, 3, 8), normal(random, 8).bfloat16()), {"eps": 1e-5}
        ),
        "rms-norm-zero": Case("rms_norm", (torch.zeros(2, 8), normal(random, 8)), {"eps": 1e-5}),
        "situ": Case(
            "situ",
            (10 * normal(random, 4, 6), 50 * normal(random, 4, 6)),
            {"beta": 4.0, "linear_beta": 25.0},
        ),
        "situ-unbounded": Case(
            "situ",
            (normal(random, 4, 6), normal(random, 4, 6)),
            {"beta": 4.0, "linear_beta": None},
        ),
        "linear": Case("linear", (normal(random, 2, 3, 8), normal(random, 5, 8)), {}),
        "absorb-query": Case(
            "mla_absorb_query", (normal(random, 5, 3, 4), normal(random, 27, 6)), {}
        ),
        "absorb-query-bf16": Case(
            "mla_absorb_query", (normal(random, 5, 3, 4), normal(random, 27, 6).bfloat16()), {}
        ),
        "expand-value": Case(
            "mla_expand_value",
            (normal(random, 5, 3, 6), normal(random, 27, 6)),
            {"value_dim": 5},
        ),
        "expand-value-bf16": Case(
            "mla_expand_value",
            (normal(random, 5, 3, 6).bfloat16(), normal(random, 27, 6).bfloat16()),
            {"value_dim": 4},
        ),
        "linear-bf16": Case("linear", (normal(random, 3, 8), normal(random, 5, 8).bfloat16()), {}),
    }


def _batched(random: torch.Generator) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, layout in LAYOUTS.items():
        found[f"indexer-{name}"] = _indexer(random, layout, 4)
        found[f"sparse-{name}"] = _sparse(random, layout)
        found[f"dense-{name}"] = _dense(random, layout)
        found[f"recurrence-{name}"] = _recurrence(random, layout)
        found[f"kda-prefill-{name}"] = _prefill(random, layout, -5.0)
    found["indexer-wide"] = _indexer(random, LAYOUTS["ragged"], 40)
    found["kda-prefill-softplus"] = _prefill(random, LAYOUTS["padded-inactive"], None)
    for name in ("one", "decode", "decode-inactive"):
        found[f"kda-decode-{name}"] = _decode(random, LAYOUTS[name], full_rank=True, bf16=False)
    found["kda-decode-low-rank"] = _decode(random, LAYOUTS["decode"], full_rank=False, bf16=False)
    found["kda-decode-bf16"] = _decode(random, LAYOUTS["decode"], full_rank=False, bf16=True)
    return found


def all_cases() -> dict[str, Case]:
    random = torch.Generator().manual_seed(0)
    return {
        **_writes(random),
        **_dense_maths(random),
        **_batched(random),
        "route": _route(random, 7, ties=False, renormalize=True),
        "route-plain": _route(random, 7, ties=False, renormalize=False),
        "route-ties": _route(random, 7, ties=True, renormalize=True),
        "experts-situ": _experts(random, 7, "situ", 25.0, False),
        "experts-unbounded": _experts(random, 7, "situ", None, False),
        "experts-silu-bf16": _experts(random, 7, "silu", None, True),
        "experts-one-token": _experts(random, 1, "situ", 25.0, False),
        "experts-mxfp4": _experts_mxfp4(random, 6),
        "experts-mxfp4-nan": _experts_mxfp4(random, 6, nan_scale=True),
        **_packed_ops(random),
    }


CASES = all_cases()
