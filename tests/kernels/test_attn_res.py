"""AttnResPrepare and the operators of stage two against the direct softmax over sources in fp64."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import Operator, bf16, f64, run

EPS, NORM_EPS = 1e-5, 1e-3
STATISTICS = ("numerator", "logit_max", "exp_sum")


def prepare(sources, queries):
    return run(
        "AttnResPrepare",
        {"sources": sources, "queries": queries},
        {"numerator": np.float32, "logit_max": np.float32, "exp_sum": np.float32},
        eps=EPS,
    )


def named(statistics):
    return dict(zip(STATISTICS, statistics, strict=True))


def update(prefix, query, statistics, site):
    inputs = {"prefix": prefix, "query": query, **named(statistics)}
    return run("AttnResUpdate", inputs, {"output": np.float32}, site=site, eps=EPS)[0]


def update_norm(prefix, query, statistics, weight, site):
    inputs = {"prefix": prefix, "query": query, **named(statistics)}
    inputs["norm_weight"] = weight
    attributes = {"site": site, "eps": EPS, "norm_eps": NORM_EPS}
    return run("AttnResUpdateNorm", inputs, {"output": np.float32}, **attributes)[0]


def add_update_norm(prefix, delta, query, statistics, weight, site):
    inputs = {"prefix": prefix, "delta": delta, "query": query, **named(statistics)}
    inputs["norm_weight"] = weight
    attributes = {"site": site, "eps": EPS, "norm_eps": NORM_EPS}
    outputs = {"new_prefix": np.float32, "output": np.float32}
    return run("AttnResAddUpdateNorm", inputs, outputs, **attributes)


def scores(sources, query):
    """[n, T]: the query against the RMS-normalised sources."""
    return (sources @ query) / np.sqrt((sources * sources).mean(-1) + EPS)


def mix(sources, query):
    logits = scores(sources, query)
    weights = np.exp(logits - logits.max(0))
    return ((weights / weights.sum(0))[..., None] * sources).sum(0)


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + NORM_EPS) * weight


def draw(rng, n, tokens, hidden, sites):
    sources = rng.standard_normal((n, tokens, hidden)).astype(np.float32)
    # Scores of standard deviation 2: neither a uniform mix nor a single winner.
    queries = (2 * rng.standard_normal((sites, hidden)) / np.sqrt(hidden)).astype(np.float32)
    return sources, queries


def expect_direct_mix(rng, n, tokens, hidden, sites):
    sources, queries = draw(rng, n, tokens, hidden, sites)
    prefix = rng.standard_normal((tokens, hidden)).astype(np.float32)
    statistics = prepare(sources, queries)
    assert statistics[0].shape == (sites, tokens, hidden)
    for s in range(sites):
        logits = scores(f64(sources), f64(queries[s]))
        np.testing.assert_allclose(statistics[1][s], logits.max(0), rtol=0, atol=1e-5)
        every = np.concatenate([f64(sources), f64(prefix)[None]])
        merged = update(prefix, queries[s], statistics, s)
        np.testing.assert_allclose(merged, mix(every, f64(queries[s])), rtol=0, atol=5e-5)


@pytest.mark.parametrize(("n", "tokens", "hidden", "sites"),
                         [(1, 1, 16, 1), (3, 5, 37, 6), (9, 2, 130, 24), (2, 0, 8, 3),
                          (2, 3, 8, 0), (4, 40, 64, 5)])  # fmt: skip
def test_two_stages_equal_the_direct_mix(level, rng, n, tokens, hidden, sites):
    expect_direct_mix(rng, n, tokens, hidden, sites)


def test_extreme_sources(level, rng):
    """Zero, tiny, huge and equal sources; logits far apart."""
    sources, queries = draw(rng, 5, 2, 48, 4)
    sources[0] = 0.0
    sources[1] *= 1e-30
    sources[2] *= 1e15
    sources[4] = sources[3]
    queries[3] *= 500.0
    prefix = (rng.standard_normal((2, 48)) * 3).astype(np.float32)
    statistics = prepare(sources, queries)
    every = np.concatenate([f64(sources), f64(prefix)[None]])
    for s in range(4):
        merged = update(prefix, queries[s], statistics, s)
        # An error in a logit scales its weight: 500 times larger logits, 500 times the error.
        expected = mix(every, f64(queries[s]))
        tolerance = 1e-6 * max(np.abs(every).max(), 1) * (500 if s == 3 else 1)
        np.testing.assert_allclose(merged, expected, rtol=0, atol=tolerance)


def expect_add_and_norm(rng, tokens, hidden, narrow_weight):
    sources, queries = draw(rng, 3, tokens, hidden, 2)
    prefix, delta = rng.standard_normal((2, tokens, hidden)).astype(np.float32)
    weight = (1 + rng.standard_normal(hidden)).astype(np.float32)
    weight = bf16(weight) if narrow_weight else weight
    statistics = prepare(sources, queries)
    total, normed = add_update_norm(prefix, delta, queries[1], statistics, weight, 1)
    np.testing.assert_array_equal(total, prefix + delta)
    every = np.concatenate([f64(sources), f64(total)[None]])
    expected = rms_norm(mix(every, f64(queries[1])), f64(weight))
    np.testing.assert_allclose(normed, expected, rtol=1e-5, atol=5e-5)
    alone = update_norm(total, queries[1], statistics, weight, 1)
    np.testing.assert_array_equal(alone, normed)


@pytest.mark.parametrize("narrow_weight", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (5, 37), (40, 130), (0, 8), (3, 1)])
def test_the_add_before_and_the_norm_after(level, rng, tokens, hidden, narrow_weight):
    expect_add_and_norm(rng, tokens, hidden, narrow_weight)


def test_a_zero_mix_is_normed_to_zero_and_eps_guards_a_tiny_one(level):
    sources, query = np.zeros((2, 3, 20), np.float32), np.ones(20, np.float32)
    statistics = prepare(sources, query[None])
    prefix = np.zeros((3, 20), np.float32)
    prefix[1] = 1e-18
    weight = np.full(20, 3, np.float32)
    normed = update_norm(prefix, query, statistics, weight, 0)
    np.testing.assert_array_equal(normed[[0, 2]], 0)
    np.testing.assert_allclose(normed[1], 1e-18 / 3 / NORM_EPS**0.5 * 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("sources", "queries", "message"),
    [
        (np.zeros((0, 2, 8)), np.zeros((1, 8)), "input sources: has no source"),
        (np.zeros((1, 2, 8)), np.zeros((1, 9)), "input queries: shape"),
        (np.zeros((2, 8)), np.zeros((1, 8)), "input sources: shape"),
    ],
)
def test_prepare_bad_inputs_are_named(sources, queries, message):
    with pytest.raises(Exception, match="AttnResPrepare") as raised:
        prepare(sources.astype(np.float32), queries.astype(np.float32))
    assert message in str(raised.value)


SHAPES = {
    "prefix": (2, 8),
    "delta": (2, 8),
    "query": (8,),
    "numerator": (3, 2, 8),
    "logit_max": (3, 2),
    "exp_sum": (3, 2),
    "norm_weight": (8,),
}


def call_with(**changes):
    """All three operators' door: the one that has every input."""
    names = {name: np.zeros(changes.get(name, shape), np.float32) for name, shape in SHAPES.items()}
    attributes = {"site": changes.get("site", 0), "eps": EPS}
    attributes["norm_eps"] = changes.get("norm_eps", NORM_EPS)
    outputs = {"new_prefix": np.float32, "output": np.float32}
    return Operator("AttnResAddUpdateNorm", names, outputs, **attributes)(names)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("prefix", (2, 8, 1)),
        ("delta", (2, 9)),
        ("delta", (1, 8)),
        ("query", (9,)),
        ("numerator", (3, 3, 8)),
        ("numerator", (2, 8)),
        ("logit_max", (3, 1)),
        ("logit_max", (2, 2)),
        ("exp_sum", (3, 2, 1)),
        ("norm_weight", (1,)),
    ],
)
def test_update_bad_inputs_are_named(name, shape):
    with pytest.raises(Exception, match="AttnResAddUpdateNorm") as raised:
        call_with(**{name: shape})
    assert f"input {name}: shape" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"site": 3}, "input numerator: has no site 3"),
        ({"site": -1}, "site"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_update_bad_attributes_are_named(change, message):
    with pytest.raises(Exception, match="AttnResAddUpdateNorm") as raised:
        call_with(**change)
    assert message in str(raised.value)
