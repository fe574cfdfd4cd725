"""Every operator on drawn shapes against float64, at a drawn instruction-set level.

The bounds are those of the operators' own tests, derived there; only what those cannot say for any
shape is stated here. `make soak` draws many more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from . import (
    fuzz_calls,
    test_attention,
    test_attn_res,
    test_kda_layer,
    test_kda_recurrence,
    test_linear,
    test_mla_absorb,
    test_moe,
    test_paged_write,
    test_rms_norm,
    test_situ,
)
from . import test_lightning_indexer as test_indexer
from .fuzz_values import Draws
from .harness import BFLOAT16, f64, machine_levels

DTYPES = (np.dtype(np.float32), BFLOAT16)


@contextmanager
def at_level(level: str) -> Iterator[None]:
    before = os.environ.get("HYBRIDGE_KERNEL_LEVEL")
    os.environ["HYBRIDGE_KERNEL_LEVEL"] = level
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYBRIDGE_KERNEL_LEVEL"]
        else:
            os.environ["HYBRIDGE_KERNEL_LEVEL"] = before


def _levels() -> list[str]:
    try:
        return list(machine_levels())
    except Exception:  # no library: the fixture skips the tests
        return ["plain"]


levels = st.sampled_from(_levels())
generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)
dtypes = st.sampled_from(DTYPES)
# 0 and 1 more often than their share; sizes around every width and tile, and any other.
tokens = st.one_of(st.sampled_from([0, 1]), st.integers(0, 40))
sizes = st.one_of(st.sampled_from([1, 15, 16, 17, 32, 33, 64]), st.integers(1, 80))


@st.composite
def ragged(draw: Any, most: int = 130) -> dict[str, Any]:
    """Sequences: tokens in this call, tokens before it, cache geometry, padding."""
    sequences = draw(st.integers(0, 4))
    lists = lambda one: draw(st.lists(one, min_size=sequences, max_size=sequences))  # noqa: E731
    return {
        "queries": lists(tokens),
        "contexts": lists(st.one_of(st.just(0), st.integers(0, most))),
        "block": draw(st.sampled_from([1, 2, 7, 16, 64, 300])),
        "padding": draw(st.integers(0, 3)),
        "dtype": draw(dtypes),
    }


@given(levels, generators, ragged(), st.integers(0, 20), sizes, st.data())
def test_drawn_dense_and_sparse_attention(level, rng, batch, heads, row, data):
    value_dim = data.draw(st.integers(1, row))
    inputs = test_attention.batch(rng, **batch, heads=heads, row=row)
    positions = test_attention.draw_positions(rng, inputs, data.draw(st.integers(0, 60)))
    with at_level(level):
        test_attention.check(inputs, value_dim, row**-0.5)
        sparse = test_attention.with_positions(inputs, positions)
        test_attention.check(sparse, value_dim, row**-0.5)


@given(levels, generators, ragged(), st.integers(0, 20), sizes, st.integers(1, 80), st.booleans())
def test_drawn_lightning_indexer(level, rng, batch, heads, dim, top_k, ties):
    inputs = test_indexer.batch(rng, **batch, heads=heads, dim=dim, integers=ties)
    with at_level(level):
        (test_indexer.check_exact if ties else test_indexer.check)(inputs, top_k)


@given(levels, generators)
def test_drawn_layouts(level, rng):
    """Blocks shared between sequences, positions in any order and repeated (fuzz_calls.py)."""
    d = Draws(rng, plain=True)
    attended, attributes = fuzz_calls.sparse_attention(d)
    indexed, limit = fuzz_calls.lightning_indexer(d)
    assume(not d.degenerate)
    with at_level(level):
        test_attention.check(attended, attributes["value_dim"], 0.15)
        test_indexer.check(indexed, limit["top_k"])


@st.composite
def stateful(draw: Any) -> tuple[list[int], list[int], list[int]]:
    """Tokens, tokens before, and slots (-1: none) of some sequences."""
    count = draw(st.integers(1, 4))
    slots = draw(st.permutations(range(count + 1)))[:count]
    lists = lambda one: draw(st.lists(one, min_size=count, max_size=count))  # noqa: E731
    kept = lists(st.booleans())
    chosen = [slot if keep else -1 for slot, keep in zip(slots, kept, strict=True)]
    return lists(tokens), lists(st.sampled_from([0, 0, 1, 9])), chosen


@given(levels, generators, stateful(), st.integers(1, 3), sizes, sizes)
def test_drawn_kda_recurrence(level, rng, batch, heads, key, value):
    counts, contexts, slots = batch
    starts = [0, *np.cumsum(counts)]
    arrays = test_kda_recurrence.inputs(
        rng, starts, contexts, slots, heads=heads, key=key, value=value
    )
    with at_level(level):
        # A key of one channel is +-1: no decay but its own forgets, so errors add up.
        test_kda_recurrence.expect_like_reference(arrays)


@given(levels, generators, stateful(), st.integers(1, 3), sizes, st.integers(1, 5),
       st.sampled_from(test_kda_layer.BOUNDS))  # fmt: skip
def test_drawn_kda_prefill(level, rng, batch, heads, width, taps, bound):
    arrays = test_kda_layer.prefill_inputs(rng, *batch, heads=heads, width=width, taps=taps)
    with at_level(level):
        test_kda_layer.expect_prefill(arrays, bound)


@given(levels, generators, stateful(), st.integers(1, 3), sizes, sizes, st.integers(1, 9),
       st.booleans(), dtypes, st.sampled_from(test_kda_layer.BOUNDS))  # fmt: skip
def test_drawn_kda_decode(level, rng, batch, heads, width, hidden, rank, full_gate, dtype, bound):
    _, contexts, slots = batch
    arrays = test_kda_layer.decode_inputs(
        rng, contexts, slots, heads=heads, width=width, hidden=hidden, rank=rank,
        full_gate=full_gate, weights=dtype,
    )  # fmt: skip
    with at_level(level):
        test_kda_layer.expect_decode(arrays, bound)


activations = st.sampled_from([test_moe.SITU, test_moe.SILU, {"activation": "situ", "beta": 2.0}])


@given(levels, generators, tokens, st.integers(1, 9), sizes, sizes, dtypes, activations, st.data())
def test_drawn_experts(level, rng, count, experts, latent, intermediate, dtype, activation, data):
    top_k = data.draw(st.integers(1, experts))
    arrays = test_moe.draw(rng, count, experts, top_k, latent, intermediate)
    arrays |= {name: arrays[name].astype(dtype) for name in ("gate_up", "down")}
    with at_level(level):
        test_moe.expect_experts("MoeExperts", level, arrays, f64(arrays["gate_up"]),
                                f64(arrays["down"]), dtype, **activation)  # fmt: skip


@given(levels, generators, tokens, st.integers(1, 6), st.integers(1, 9), st.integers(1, 9),
       activations, st.data())  # fmt: skip
def test_drawn_mxfp4_experts(level, rng, count, experts, latent, intermediate, activation, data):
    top_k = data.draw(st.integers(1, experts))
    arrays = test_moe.draw_packed(rng, count, latent=32 * latent, intermediate=32 * intermediate,
                                  experts=experts, top_k=top_k)  # fmt: skip
    with at_level(level):
        test_moe.expect_mxfp4(level, arrays, **activation)


@given(levels, generators, tokens, sizes, sizes, dtypes, st.booleans(), st.data())
def test_drawn_route(level, rng, count, hidden, experts, dtype, renormalize, data):
    """The best experts, in order, to within what rounding may exchange."""
    top_k = data.draw(st.integers(1, experts))
    x = rng.standard_normal((count, hidden)).astype(np.float32)
    gate_weight = rng.standard_normal((experts, hidden)).astype(dtype)
    bias = rng.standard_normal(experts).astype(np.float32)
    with at_level(level):
        ids, weights = test_moe.route(x, gate_weight, bias, top_k, renormalize=renormalize)
    scores = test_moe.sigmoid(f64(x) @ f64(gate_weight).T)
    # A sum of `hidden` products is off by hidden 2^-24 of its magnitudes, and sigmoid's slope is
    # at most 1/4; key and sigmoid add roundings of numbers below 8.
    spread = np.abs(f64(x)) @ np.abs(f64(gate_weight)).T
    margin = spread.max(initial=0) * (hidden + 2) * 2.0**-25 + 2.0**-20
    keys = scores + f64(bias)
    chosen = np.take_along_axis(keys, ids.astype(np.int64), axis=1)
    best = -np.sort(-keys, axis=1)[:, :top_k]
    np.testing.assert_allclose(chosen, best, rtol=0, atol=margin)
    assert all(len(set(row)) == top_k for row in ids)
    expected = np.take_along_axis(scores, ids.astype(np.int64), axis=1)
    if renormalize:
        expected /= expected.sum(1, keepdims=True) + 1e-20
        margin = margin * top_k / max(np.min(scores, initial=1.0), 1e-3)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=margin)


@given(levels, generators, tokens, sizes, st.integers(1, 300), dtypes)
def test_drawn_linear(level, rng, rows, outputs, inputs, dtype):
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    with at_level(level):
        test_linear.check(x, rng.standard_normal((outputs, inputs)).astype(dtype))


@given(levels, generators, tokens, st.integers(1, 5), sizes, sizes, sizes, dtypes)
def test_drawn_absorbed_products(level, rng, count, heads, nope, value, latent, dtype):
    arrays = test_mla_absorb.draw(rng, count, heads, nope, value, latent, dtype)
    with at_level(level):
        test_mla_absorb.check(*arrays)


@given(levels, generators, tokens, st.integers(1, 300), dtypes)
def test_drawn_rms_norm(level, rng, rows, width, dtype):
    x = (rng.standard_normal((rows, width)) * 3).astype(np.float32)
    weight = rng.standard_normal(width).astype(dtype)
    with at_level(level):
        out = test_rms_norm.norm(x, weight)
    np.testing.assert_allclose(out, test_rms_norm.expected(x, weight), rtol=2e-6, atol=1e-12)


@given(levels, generators, tokens, st.integers(1, 100), st.sampled_from([None, 25.0]))
def test_drawn_situ(level, rng, rows, width, linear_beta):
    gate = (rng.standard_normal((rows, width)) * 8).astype(np.float32)
    up = (rng.standard_normal((rows, width)) * 40).astype(np.float32)
    attributes = {"beta": 4.0} | ({} if linear_beta is None else {"linear_beta": linear_beta})
    with at_level(level):
        out = test_situ.situ(gate, up, **attributes)
    want = test_situ.expected(gate, up, 4.0, linear_beta)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-30)


@given(levels, generators, st.integers(1, 6), tokens, sizes, st.integers(0, 6), st.booleans())
def test_drawn_attention_residuals(level, rng, n, count, hidden, sites, narrow):
    with at_level(level):
        test_attn_res.expect_add_and_norm(rng, count, hidden, narrow)
        test_attn_res.expect_direct_mix(rng, n, count, hidden, sites)


@given(levels, generators, st.integers(0, 30), st.integers(1, 9), sizes, dtypes, dtypes, st.data())
def test_drawn_writes(level, rng, slots, block, width, cache_dtype, rows_dtype, data):
    cache = rng.standard_normal((slots, block, width)).astype(cache_dtype)
    count = data.draw(st.integers(0, 20))
    numbers = [*rng.permutation(slots * block)[:count], *[-1] * count][:count]
    rows = rng.standard_normal((count, width)).astype(rows_dtype)
    want = cache.copy()
    for row, slot in zip(rows, numbers, strict=True):
        if slot >= 0:
            want[slot // block, slot % block] = f64(row).astype(cache_dtype)
    states = cache.reshape(-1, width).copy()
    with at_level(level):
        test_paged_write.paged_write(cache, rows, numbers)
        test_paged_write.state_write(states, rows, numbers)
    np.testing.assert_array_equal(cache.view(np.uint8), want.view(np.uint8))
    np.testing.assert_array_equal(states.view(np.uint8), want.reshape(-1, width).view(np.uint8))
