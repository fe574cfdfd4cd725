"""Drawn calls of every operator for `make fuzz` (fuzz.py), each made from a seed and a number alone.

A valid call must return; a broken one (fuzz_faults.py) must be refused by name. What is drawn are sizes, numbers
and layouts that no test has thought of; results are compared with float64 in test_shapes.py instead (`make soak`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from . import fuzz_faults, test_reuse
from .cases import Arrays, Case, all_cases
from .fuzz_faults import Drawn, Outcome
from .fuzz_values import F32, Draws
from .harness import BFLOAT16, i32

Attributes = dict[str, object]
Draw = Callable[[Draws], tuple[Arrays, Attributes]]

BROKEN = 0.4  # of all calls


def attention(d: Draws) -> tuple[Arrays, Attributes]:
    ragged = d.ragged()
    blocks, block, table = d.paged(ragged)
    heads, row = (d.count(70) if d.chance(0.1) else d.count(20)), d.inner()
    inputs = {
        "query": d.array(ragged.tokens, heads, row),
        "latent_cache": d.array(blocks, block, 1, row, dtype=d.dtype()),
        **ragged.arrays(),
        "block_table": table,
    }
    return inputs, {"scale": float(d.rng.choice([0.2, 1e-30, 1e30])), "value_dim": d.size(row or 1)}


def sparse_attention(d: Draws) -> tuple[Arrays, Attributes]:
    inputs, attributes = attention(d)
    width = d.integer(200, 1400) if d.chance(0.05) else d.count(60)
    positions = d.rng.choice(i32([-1, 0, 9, -(2**31)]), (len(inputs["query"]), width))
    starts, contexts = inputs["query_start"], inputs["context_len"]
    for b, context in enumerate(contexts):
        for token in range(starts[b], starts[b + 1]):  # in any order, with repetitions
            positions[token] = d.rng.integers(-1, context + token - starts[b] + 1, width)
            if d.chance(0.5):
                positions[token, d.integer(0, width) :] = -1
    query, cache, *rest = inputs
    first = {query: inputs[query], cache: inputs[cache], "positions": positions}
    return first | {name: inputs[name] for name in rest}, attributes


def lightning_indexer(d: Draws) -> tuple[Arrays, Attributes]:
    ragged = d.ragged()
    blocks, block, table = d.paged(ragged)
    heads, row = d.count(20), d.inner()
    inputs = {
        "query": d.array(ragged.tokens, heads, row),
        "head_weights": d.array(ragged.tokens, heads),
        "indexer_cache": d.array(blocks, block, 1, row, dtype=d.dtype()),
        **ragged.arrays(),
        "block_table": table,
    }
    floats = [inputs[name] for name in ("query", "head_weights", "indexer_cache")]
    if not all((np.abs(a.astype(np.float32)) < 1e9).all() for a in floats):
        d.undefined = True  # it depends on what the numbers add up to
    return inputs, {"top_k": d.integer(300, 2000) if d.chance(0.05) else d.size(80)}


def kda_recurrence(d: Draws) -> tuple[Arrays, Attributes]:
    ragged = d.ragged()
    heads, key, value = d.inner(3), d.inner(130), d.inner(130)
    slots, tokens = len(ragged.counts) + d.integer(0, 2), ragged.tokens
    inputs = {
        "query": d.array(tokens, heads, key),
        "key": d.array(tokens, heads, key),
        "value": d.array(tokens, heads, value),
        "log_decay": -abs(d.array(tokens, heads, key)),
        "beta": d.array(tokens, heads),
        "state": d.array(slots, heads, key, value),
        **ragged.arrays(),
        "state_slot": d.slots(len(ragged.counts), slots),
    }
    return inputs, {}


def kda_gate(d: Draws, heads: int, width: int, taps: int) -> Arrays:
    channels = heads * width
    return {
        "conv_weight": d.array(3 * channels, taps),
        "a_log": d.array(heads),
        "dt_bias": d.array(channels),
    }


def lower_bound(d: Draws) -> Attributes:
    return {"lower_bound": float(d.rng.choice([-5.0, -0.1]))} if d.chance(0.5) else {}


def kda_prefill(d: Draws) -> tuple[Arrays, Attributes]:
    ragged = d.ragged()
    heads, width, taps = d.inner(3), d.inner(130), d.inner(5)
    channels, tokens = heads * width, ragged.tokens
    slots = len(ragged.counts) + d.integer(0, 2)
    inputs = {
        "qkv": d.array(tokens, 3 * channels),
        "gate": d.array(tokens, channels),
        "beta": d.array(tokens, heads),
        **kda_gate(d, heads, width, taps),
        "conv_state": d.array(slots, 3 * channels, max(taps - 1, 0)),
        "state": d.array(slots, heads, width, width),
        **ragged.arrays(),
        "state_slot": d.slots(len(ragged.counts), slots),
    }
    return inputs, lower_bound(d)


def kda_decode(d: Draws, *, packed: bool = False) -> tuple[Arrays, Attributes]:
    batch, taps, rank = d.count(9), d.inner(5), d.inner(40)
    if packed:
        heads = int(d.rng.choice([1, 2, 4]))
        width, hidden = 128 // heads, 128 * d.integer(1, 2)
    else:
        heads, width, hidden = d.inner(3), d.inner(), d.inner(130)
    channels, slots = heads * width, batch + d.integer(0, 2)
    gate_rank = 0 if d.chance(0.3) else d.size(20)  # 0: a full-rank gate

    def stored(*shape: int) -> np.ndarray:
        return d.packed(*shape) if packed else d.array(*shape, dtype=d.dtype())

    inputs = {
        "x": d.array(batch, hidden),
        "in_weight": stored(3 * channels + rank + heads + (gate_rank or channels), hidden),
        "f_b_weight": d.array(channels, rank, dtype=d.dtype()),
        "g_b_weight": d.array(channels, gate_rank, dtype=d.dtype()) if gate_rank else None,
        **kda_gate(d, heads, width, taps),
        "norm_weight": d.array(width),
        "o_weight": stored(hidden, channels),
        "conv_state": d.array(slots, 3 * channels, max(taps - 1, 0)),
        "state": d.array(slots, heads, width, width),
        "context_len": i32([d.count(2000) for _ in range(batch)]),
        "state_slot": d.slots(batch, slots),
    }
    return inputs, {"norm_eps": 1e-5, **lower_bound(d)}


def activation(d: Draws) -> Attributes:
    if d.chance(0.3):
        return {"activation": "silu"}
    bounded = {"linear_beta": 25.0} if d.chance(0.5) else {}
    return {"activation": "situ", "beta": 4.0, **bounded}


def chosen_experts(d: Draws, tokens: int, experts: int, latent: int) -> Arrays:
    """Any experts; a token may have one twice, and all tokens the same."""
    top_k = d.count(6)
    most = 0 if d.chance(0.2) else experts - 1
    return {
        "x": d.array(tokens, latent),
        "expert_ids": i32(d.rng.integers(0, max(most, 0) + 1, (tokens, top_k))),
        "expert_weights": d.array(tokens, top_k),
    }


def rounding(d: Draws) -> Attributes:
    return {"bf16_activations": d.integer(0, 1)} if d.chance(0.7) else {}


def experts(d: Draws) -> tuple[Arrays, Attributes]:
    number, latent, dtype = d.inner(9), d.inner(), d.dtype()
    intermediate = d.many(70, 600) if d.chance(0.5) else d.inner()
    inputs = {
        **chosen_experts(d, d.count(), number, latent),
        "gate_up": d.array(number, 2 * intermediate, latent, dtype=dtype),
        "down": d.array(number, latent, intermediate, dtype=dtype),
    }
    return inputs, activation(d) | rounding(d)


def packed_experts(d: Draws) -> tuple[Arrays, Attributes]:
    number, latent, intermediate = d.size(4), 128 * d.integer(1, 2), 128 * d.integer(1, 2)
    inputs = {
        **chosen_experts(d, d.count(20), number, latent),
        "gate_up": d.packed(number, 2 * intermediate, latent),
        "down": d.packed(number, latent, intermediate),
    }
    return inputs, activation(d) | rounding(d)


def mxfp4_experts(d: Draws) -> tuple[Arrays, Attributes]:
    number, latent, intermediate = d.inner(5), 32 * d.inner(5), 32 * d.inner(5)

    def scales(*shape: int) -> np.ndarray:  # ordinary ones, or any: 0 is subnormal, 255 NaN
        return d.bytes(*shape) if d.chance(0.4) else d.bytes(*shape) % 9 + 120

    inputs = {
        **chosen_experts(d, d.count(), number, latent),
        "gate_up_packed": d.bytes(number, 2 * intermediate, latent // 2),
        "gate_up_scale": scales(number, 2 * intermediate, latent // 32),
        "down_packed": d.bytes(number, latent, intermediate // 2),
        "down_scale": scales(number, latent, intermediate // 32),
    }
    return inputs, activation(d) | rounding(d)


def route(d: Draws) -> tuple[Arrays, Attributes]:
    number, hidden = d.many(70, 600) if d.chance(0.5) else d.inner(), d.inner()
    inputs = {
        "x": d.array(d.count(), hidden),
        "gate_weight": d.array(number, hidden, dtype=d.dtype()),
        "bias": d.array(number),
    }
    top_k = d.size(number or 1)
    return inputs, {"top_k": top_k, "renormalize": d.integer(0, 1), "scale": 2.5}


def leading(d: Draws) -> tuple[int, ...]:
    """The dimensions before the last: of one row, of a matrix, of more."""
    return tuple(d.count(40 if rank == 1 else 5) for rank in [d.integer(0, 3)] for _ in range(rank))


def linear(d: Draws) -> tuple[Arrays, Attributes]:
    inputs = d.inner(300)
    outputs = d.many(70, 2000) if d.chance(0.9) else 0
    weight = d.array(outputs, inputs, dtype=d.dtype())
    return {"x": d.array(*leading(d), inputs), "weight": weight}, rounding(d)


def packed_linear(d: Draws) -> tuple[Arrays, Attributes]:
    inputs = 128 * d.integer(1, 4)
    weight = d.packed(d.many(70, 2000) if d.chance(0.9) else 0, inputs)
    return {"x": d.array(*leading(d), inputs), "weight": weight}, rounding(d)


def kv_b(d: Draws, *, expand: bool) -> tuple[Arrays, Attributes]:
    heads, nope, value, latent = d.size(5), d.size(), d.size(), d.inner()
    x = {"latent": (heads, latent)} if expand else {"query": (heads, nope)}
    inputs = {name: d.array(d.count(), *shape) for name, shape in x.items()}
    inputs["kv_b_weight"] = d.array(heads * (nope + value), latent, dtype=d.dtype())
    return inputs, ({"value_dim": value} if expand else {}) | rounding(d)


def rms_norm(d: Draws) -> tuple[Arrays, Attributes]:
    width = d.inner(300)
    weight = d.array(width, dtype=d.dtype())
    return {"x": d.array(*leading(d), width), "weight": weight}, {"eps": 1e-5}


def situ(d: Draws) -> tuple[Arrays, Attributes]:
    shape = (*leading(d), d.count(300))
    bounded = {"linear_beta": 25.0} if d.chance(0.5) else {}
    return {"gate": d.array(*shape), "up": d.array(*shape)}, {"beta": 4.0, **bounded}


def prepare(d: Draws) -> tuple[Arrays, Attributes]:
    hidden = d.inner(300)
    sources = d.array(d.inner(9), d.count(20), hidden)
    return {"sources": sources, "queries": d.array(d.count(24), hidden)}, {"eps": 1e-5}


def update(d: Draws, *, add: bool = False, norm: bool = False) -> tuple[Arrays, Attributes]:
    tokens, hidden, sites = d.count(), d.inner(300), d.size(5)
    inputs = {"prefix": d.array(tokens, hidden)}
    if add:
        inputs["delta"] = d.array(tokens, hidden)
    inputs |= {
        "query": d.array(hidden),
        "numerator": d.array(sites, tokens, hidden),
        "logit_max": d.array(sites, tokens),
        "exp_sum": d.array(sites, tokens),
    }
    attributes: Attributes = {"site": d.integer(0, sites - 1), "eps": 1e-5}
    if norm:
        inputs["norm_weight"] = d.array(hidden, dtype=d.dtype())
        attributes["norm_eps"] = 1e-5
    return inputs, attributes


def paged_write(d: Draws) -> tuple[Arrays, Attributes]:
    blocks, block = d.count(20), d.count(16)
    row = tuple(d.count(20) for _ in range(d.integer(0, 3)))
    tokens = d.count(30)
    inputs = {
        "cache": d.array(blocks, block, *row, dtype=d.dtype()),
        "rows": d.array(tokens, *row, dtype=d.dtype()),
        "slot_mapping": d.slots(tokens, blocks * block),
    }
    return inputs, {}


def state_write(d: Draws) -> tuple[Arrays, Attributes]:
    slots, batch = d.count(20), d.count(9)
    row = tuple(d.count(20) for _ in range(d.integer(0, 3)))
    inputs = {
        "state": d.array(slots, *row, dtype=d.dtype()),
        "rows": d.array(batch, *row, dtype=d.dtype()),
        "state_slot": d.slots(batch, slots),
    }
    return inputs, {}


DRAWS: dict[str, Draw] = {
    "AttnResAddUpdateNorm": functools.partial(update, add=True, norm=True),
    "AttnResPrepare": prepare,
    "AttnResUpdate": update,
    "AttnResUpdateNorm": functools.partial(update, norm=True),
    "KdaDecode": kda_decode,
    "KdaDecodePacked": functools.partial(kda_decode, packed=True),
    "KdaPrefill": kda_prefill,
    "KdaRecurrence": kda_recurrence,
    "LightningIndexer": lightning_indexer,
    "Linear": linear,
    "LinearPacked": packed_linear,
    "MlaAbsorbQuery": functools.partial(kv_b, expand=False),
    "MlaAttention": attention,
    "MlaExpandValue": functools.partial(kv_b, expand=True),
    "MoeExperts": experts,
    "MoeExpertsMxfp4": mxfp4_experts,
    "MoeExpertsPacked": packed_experts,
    "MoeRoute": route,
    "PagedWrite": paged_write,
    "RmsNorm": rms_norm,
    "Situ": situ,
    "SparseFlashAttention": sparse_attention,
    "StateWrite": state_write,
}


@functools.cache
def templates() -> dict[str, Case]:
    """Of each operator a case, for what does not depend on the drawing: outputs, aliases, free axes."""
    return {case.op: case for case in all_cases(F32)}


def valid(op: str, d: Draws) -> Case:
    inputs, attributes = DRAWS[op](d)
    template = templates()[op]
    # In place, or as when onnxruntime had to bind other memory; and where an output may take an input's.
    alias = template.alias or (test_reuse.CASES[op][1] if op in test_reuse.CASES else {})
    case = replace(
        template,
        inputs=inputs,
        attributes=attributes,
        alias=dict(alias) if d.chance(0.6) else {},
        _operators={},
    )
    if op in ("Linear", "LinearPacked", "RmsNorm"):
        case.free = {**template.free, "x": set(range(inputs["x"].ndim - 1))}
    elif "kv_b_weight" in inputs:  # whose rows may be those of other heads as well
        case.free = {"query": {0, 1, 2}, "latent": {0, 1}, "kv_b_weight": {0, 1}}
        if op == "MlaExpandValue":
            case.free["kv_b_weight"] = {0}
    case.outputs = fuzz_faults.outputs_for(case)
    return case


def call(seed: int, number: int) -> Drawn:
    """Call `number` of this seed; consecutive numbers go over all operators in turn."""
    op = sorted(DRAWS)[number % len(DRAWS)]
    rng = np.random.default_rng([seed, number])
    d = Draws(rng)
    case = valid(op, d)
    if d.chance(BROKEN):
        drawn = fuzz_faults.broken(case, rng)
        # One size less than 1 may have been broken before.
        return replace(drawn, outcome=Outcome.EITHER) if d.degenerate else drawn
    uncertain = d.degenerate or d.undefined
    return Drawn(case, Outcome.EITHER if uncertain else Outcome.RETURNS, "valid")


__all__ = ["BFLOAT16", "DRAWS", "Drawn", "Outcome", "call"]
