"""One small valid call of every operator, for the tests that go over all of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hybridge.ops.packed_rows import pack_rows

from . import test_attention, test_attn_res, test_kda_layer, test_kda_recurrence, test_moe
from . import test_lightning_indexer as test_indexer
from .harness import BFLOAT16, Operator, bf16, i32

Arrays = dict[str, np.ndarray | None]
F32 = np.float32
SITU = {"activation": "situ", "beta": 4.0, "linear_beta": 25.0}


@dataclass
class Case:
    """A call, and what the operator's checks leave open.

    Attributes:
        free: axes of an input that may have any size, by themselves.
        any_value: integer inputs whose entries may be any non-negative number here.
    """

    op: str
    inputs: Arrays
    outputs: dict[str, object]
    attributes: dict[str, object] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)
    free: dict[str, set[int]] = field(default_factory=dict)
    any_value: frozenset[str] = frozenset()
    _operators: dict[object, Operator] = field(default_factory=dict, repr=False)

    def run(self, inputs: Arrays | None = None) -> list[np.ndarray]:
        """Calls the operator, with these inputs or with the case's own (aliased ones change)."""
        arrays = self.inputs if inputs is None else inputs
        types = tuple(None if a is None else (a.dtype, a.ndim) for a in arrays.values())
        key = (os.environ.get("HYBRIDGE_KERNEL_LEVEL"), types)
        if key not in self._operators:
            self._operators[key] = Operator(
                self.op, arrays, self.outputs, alias=self.alias, threads=1, **self.attributes
            )
        return self._operators[key](arrays)


def attention_cases(rng: np.random.Generator, dtype: object) -> list[Case]:
    dense = test_attention.batch(rng, [2, 0, 3], [9, 5, 0], dtype=np.dtype(dtype), padding=1)
    chosen = test_attention.draw_positions(rng, dense, 6)
    sparse = test_attention.with_positions(dense, chosen)
    indexed = test_indexer.batch(rng, [2, 0, 3], [9, 5, 0], dtype=np.dtype(dtype), padding=1)
    attributes = {"scale": 0.2, "value_dim": 24}
    pages = {"latent_cache": {0, 1}, "block_table": {1}}
    return [
        Case("MlaAttention", dense, {"out": F32}, attributes, free=pages | {"query": {0, 1}}),
        Case(
            "SparseFlashAttention",
            sparse,
            {"out": F32},
            attributes,
            free=pages | {"query": {1}, "positions": {1}},
        ),
        Case(
            "LightningIndexer",
            indexed,
            {"positions": np.int32},
            {"top_k": 4},
            free={"indexer_cache": {0, 1}, "block_table": {1}},
        ),
    ]


def kda_cases(rng: np.random.Generator, dtype: object) -> list[Case]:
    both = {"output": F32, "conv_out": F32, "state_out": F32}
    alias = {"conv_out": "conv_state", "state_out": "state"}
    decode = test_kda_layer.decode_inputs(rng, [0, 4, 2], [1, 0, -1], weights=dtype)
    return [
        Case(
            "KdaRecurrence",
            test_kda_recurrence.inputs(rng, [0, 3, 3, 8], [4, 0, 0], [1, 0, 2]),
            {"output": F32, "state_out": F32},
            alias={"state_out": "state"},
            free={"state": {0}},
        ),
        Case(
            "KdaPrefill",
            test_kda_layer.prefill_inputs(rng, [2, 0, 5], [0, 1, 3], [1, 0, 2]),
            both,
            alias=alias,
        ),
        Case(
            "KdaDecode",
            decode,
            both,
            {"norm_eps": 1e-5, "lower_bound": -5.0},
            alias,
            any_value=frozenset({"context_len"}),
        ),
    ]


def expert_cases(rng: np.random.Generator, dtype: object) -> list[Case]:
    plain = test_moe.draw(rng, 5)
    plain |= {name: plain[name].astype(dtype) for name in ("gate_up", "down")}
    route = {
        "x": rng.standard_normal((5, 17)).astype(F32),
        "gate_weight": rng.standard_normal((9, 17)).astype(dtype),
        "bias": rng.standard_normal(9).astype(F32),
    }
    return [
        Case("MoeExperts", plain, {"output": F32}, {**SITU, "bf16_activations": 1}),
        Case("MoeExpertsMxfp4", test_moe.draw_packed(rng, 5), {"output": F32}, SITU),
        Case(
            "MoeRoute",
            route,
            {"expert_ids": np.int32, "expert_weights": F32},
            {"top_k": 3, "renormalize": 1, "scale": 2.5},
            free={"x": {0}},
        ),
    ]


def row_cases(rng: np.random.Generator, dtype: object) -> list[Case]:
    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(F32)

    sources, queries = test_attn_res.draw(rng, 3, 4, 19, 5)
    cache = draw(4, 3, 1, 21).astype(dtype)
    written = {"cache": cache, "rows": draw(3, 1, 21), "slot_mapping": i32([11, -1, 4])}
    state = {"state": draw(5, 2, 7).astype(dtype), "rows": draw(3, 2, 7)}
    stages = test_attn_res.STATISTICS
    shapes = ((2, 4, 19), (2, 4), (2, 4))
    statistics = {n: np.exp(draw(*shape)) for n, shape in zip(stages, shapes, strict=True)}
    update = {"prefix": draw(4, 19), "query": draw(19), **statistics}
    norm = {"norm_weight": draw(19).astype(dtype)}
    site = {"site": 1, "eps": 1e-5}
    return [
        Case("Linear", {"x": draw(9, 33), "weight": draw(6, 33).astype(dtype)}, {"out": F32},
             {"bf16_activations": 1}, free={"x": {0}, "weight": {0}}),
        # 33 rows are those of three heads only.
        Case("MlaAbsorbQuery", {"query": draw(9, 3, 6), "kv_b_weight": draw(33, 18).astype(dtype)},
             {"out": F32}, {"bf16_activations": 1},
             free={"query": {0, 2}, "kv_b_weight": {1}}),
        Case("MlaExpandValue", {"latent": draw(9, 3, 18), "kv_b_weight": draw(33, 18).astype(dtype)},
             {"out": F32}, {"value_dim": 5, "bf16_activations": 1}, free={"latent": {0}}),
        Case("RmsNorm", {"x": draw(5, 37), "weight": draw(37).astype(dtype)}, {"out": F32},
             {"eps": 1e-5}, free={"x": {0}}),
        Case("Situ", {"gate": draw(3, 41), "up": draw(3, 41)}, {"out": F32}, {"beta": 4.0}),
        Case("AttnResPrepare", {"sources": sources, "queries": queries},
             dict.fromkeys(stages, F32), {"eps": 1e-5},
             free={"sources": {0, 1}, "queries": {0}}),
        Case("AttnResUpdate", update, {"output": F32}, site),
        Case("AttnResUpdateNorm", {**update, **norm}, {"output": F32}, {**site, "norm_eps": 1e-5}),
        Case("AttnResAddUpdateNorm",
             {"prefix": draw(4, 19), "delta": draw(4, 19), **update, **norm},
             {"new_prefix": F32, "output": F32}, {**site, "norm_eps": 1e-5}),
        Case("PagedWrite", written, {"cache_out": dtype}, alias={"cache_out": "cache"},
             free={"cache": {0, 1}}),
        Case("StateWrite", {**state, "state_slot": i32([4, -1, 0])}, {"state_out": dtype},
             alias={"state_out": "state"}, free={"state": {0}}),
    ]  # fmt: skip


def packed_cases(rng: np.random.Generator, dtype: object) -> list[Case]:
    """The operators on packed weights; `dtype` is that of the weights which are not packed."""

    def packed(array: np.ndarray | None) -> np.ndarray:
        return pack_rows(bf16(array).view(np.uint16))

    x, weight = rng.standard_normal((9, 256)), rng.standard_normal((6, 256))
    decode = test_kda_layer.decode_inputs(
        rng, [0, 4, 2], [1, 0, -1], heads=2, width=64, hidden=128, weights=dtype
    )
    decode |= {name: packed(decode[name]) for name in ("in_weight", "o_weight")}
    experts = test_moe.draw(rng, 5, 4, 2, 128, 128)
    experts |= {name: packed(experts[name]) for name in ("gate_up", "down")}
    return [
        Case("LinearPacked", {"x": x.astype(F32), "weight": packed(weight)}, {"out": F32},
             {"bf16_activations": 1}, free={"x": {0}, "weight": {0}}),
        Case("KdaDecodePacked", decode, {"output": F32, "conv_out": F32, "state_out": F32},
             {"norm_eps": 1e-5, "lower_bound": -5.0},
             {"conv_out": "conv_state", "state_out": "state"},
             any_value=frozenset({"context_len"})),
        Case("MoeExpertsPacked", experts, {"output": F32}, {**SITU, "bf16_activations": 1}),
    ]  # fmt: skip


def all_cases(dtype: object, seed: int = 0) -> list[Case]:
    """One case for each operator, with caches and weights of this type where there is a choice."""
    rng = np.random.default_rng(seed)
    makers = (attention_cases, kda_cases, expert_cases, row_cases, packed_cases)
    return [case for make in makers for case in make(rng, dtype)]


def registered_operators() -> set[str]:
    """The names of the operators that the kernels' sources register."""
    sources = (Path(__file__).parents[2] / "kernels/ops").glob("*.cpp")
    registered = r'OpRegistration \w+\((?:description<\w+>\(|\{\s*)"(\w+)"'
    return {name for path in sources for name in re.findall(registered, path.read_text())}


__all__ = ["BFLOAT16", "Case", "all_cases", "bf16", "registered_operators"]
