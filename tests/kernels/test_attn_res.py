"""AttnResPrepare and AttnResUpdate against the direct softmax over sources in fp64."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import Operator, f64, run

EPS = 1e-5


def prepare(sources, queries):
    return run(
        "AttnResPrepare",
        {"sources": sources, "queries": queries},
        {"numerator": np.float32, "logit_max": np.float32, "exp_sum": np.float32},
        eps=EPS,
    )


class Update:
    """AttnResUpdate, its session made once."""

    def __init__(self):
        self.operator = None

    def __call__(self, *arrays):
        names = ("prefix", "query", "numerator", "logit_max", "exp_sum")
        inputs = dict(zip(names, arrays, strict=True))
        if self.operator is None:
            self.operator = Operator("AttnResUpdate", inputs, {"output": np.float32}, eps=EPS)
        return self.operator(inputs)[0]


def scores(sources, query):
    """[n, T]: the query against the RMS-normalised sources."""
    return (sources @ query) / np.sqrt((sources * sources).mean(-1) + EPS)


def mix(sources, query):
    logits = scores(sources, query)
    weights = np.exp(logits - logits.max(0))
    return ((weights / weights.sum(0))[..., None] * sources).sum(0)


def draw(rng, n, tokens, hidden, sites):
    sources = rng.standard_normal((n, tokens, hidden)).astype(np.float32)
    # Scores of standard deviation 2: neither a uniform mix nor a single winner.
    queries = (2 * rng.standard_normal((sites, hidden)) / np.sqrt(hidden)).astype(np.float32)
    return sources, queries


@pytest.mark.parametrize(("n", "tokens", "hidden", "sites"),
                         [(1, 1, 16, 1), (3, 5, 37, 6), (9, 2, 130, 24), (2, 0, 8, 3),
                          (2, 3, 8, 0), (4, 40, 64, 5)])  # fmt: skip
def test_two_stages_equal_the_direct_mix(level, rng, n, tokens, hidden, sites):
    sources, queries = draw(rng, n, tokens, hidden, sites)
    prefix = rng.standard_normal((tokens, hidden)).astype(np.float32)
    numerator, logit_max, exp_sum = prepare(sources, queries)
    assert numerator.shape == (sites, tokens, hidden)
    update = Update()
    for s in range(sites):
        logits = scores(f64(sources), f64(queries[s]))
        np.testing.assert_allclose(logit_max[s], logits.max(0), rtol=0, atol=1e-5)
        every = np.concatenate([f64(sources), f64(prefix)[None]])
        merged = update(prefix, queries[s], numerator[s], logit_max[s], exp_sum[s])
        np.testing.assert_allclose(merged, mix(every, f64(queries[s])), rtol=0, atol=5e-5)


def test_extreme_sources(level, rng):
    """Zero, tiny, huge and equal sources; logits far apart."""
    sources, queries = draw(rng, 5, 2, 48, 4)
    sources[0] = 0.0
    sources[1] *= 1e-30
    sources[2] *= 1e15
    sources[4] = sources[3]
    queries[3] *= 500.0
    prefix = (rng.standard_normal((2, 48)) * 3).astype(np.float32)
    numerator, logit_max, exp_sum = prepare(sources, queries)
    every = np.concatenate([f64(sources), f64(prefix)[None]])
    update = Update()
    for s in range(4):
        merged = update(prefix, queries[s], numerator[s], logit_max[s], exp_sum[s])
        # An error in a logit scales its weight: 500 times larger logits, 500 times the error.
        expected = mix(every, f64(queries[s]))
        tolerance = 1e-6 * max(np.abs(every).max(), 1) * (500 if s == 3 else 1)
        np.testing.assert_allclose(merged, expected, rtol=0, atol=tolerance)


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


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (((2, 8), (9,), (2, 8), (2,), (2,)), "query"),
        (((2, 8), (8,), (3, 8), (2,), (2,)), "numerator"),
        (((2, 8), (8,), (2, 8), (1,), (2,)), "logit_max"),
        (((2, 8), (8,), (2, 8), (2,), (2, 1)), "exp_sum"),
    ],
)
def test_update_bad_inputs_are_named(shapes, name):
    with pytest.raises(Exception, match="AttnResUpdate") as raised:
        Update()(*(np.zeros(shape, np.float32) for shape in shapes))
    assert f"input {name}: shape" in str(raised.value)
