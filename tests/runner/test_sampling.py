from __future__ import annotations

import numpy as np
import pytest

from hybridge.artifacts.errors import RunError, UsageError
from hybridge.runner.sampling import Sampler, SamplingOptions


def logits(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def draws(options: SamplingOptions, values: np.ndarray, count: int = 400) -> list[int]:
    sampler = Sampler(options)
    return [sampler.choose(values) for _ in range(count)]


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert Sampler(SamplingOptions()).choose(logits(1, 3, 3, 2)) == 1


def test_the_same_seed_draws_the_same() -> None:
    values = np.zeros(50, np.float32)
    options = SamplingOptions(temperature=1.0, seed=5)
    assert draws(options, values) == draws(options, values)
    assert draws(options, values) != draws(SamplingOptions(temperature=1.0, seed=6), values)
    unseeded = SamplingOptions(temperature=1.0, seed=None)
    assert draws(unseeded, values) != draws(unseeded, values)


def test_frequencies_follow_the_softmax() -> None:
    values = logits(0.0, 1.0, 2.0)
    for temperature in (0.5, 1.0, 2.0):
        found = np.bincount(draws(SamplingOptions(temperature), values, 8000), minlength=3) / 8000
        want = np.exp(values / temperature) / np.exp(values / temperature).sum()
        np.testing.assert_allclose(found, want, atol=0.02)


def test_top_k_keeps_the_lowest_of_equals() -> None:
    found = set(draws(SamplingOptions(1.0, top_k=2), logits(1, 2, 2, 2)))
    assert found == {1, 2}
    assert set(draws(SamplingOptions(1.0, top_k=99), logits(1, 1))) == {0, 1}


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    values = np.log(logits(0.5, 0.3, 0.15, 0.05))
    assert set(draws(SamplingOptions(1.0, top_p=0.4), values)) == {0}
    assert set(draws(SamplingOptions(1.0, top_p=0.7), values)) == {0, 1}
    assert set(draws(SamplingOptions(1.0, top_p=1.0), values)) == {0, 1, 2, 3}


def test_extreme_logits() -> None:
    hot = SamplingOptions(temperature=1e-30)
    assert set(draws(hot, logits(1, 2, -3e38), 20)) == {1}
    assert set(draws(SamplingOptions(1.0), logits(-np.inf, 0, -np.inf), 20)) == {1}
    assert set(draws(SamplingOptions(1.0), logits(np.inf, 0, np.inf))) == {0, 2}
    for options in (SamplingOptions(), SamplingOptions(1.0)):
        for values in (logits(1, np.nan, 2), logits(-np.inf, -np.inf)):
            with pytest.raises(RunError, match="no token can be chosen"):
                Sampler(options).choose(values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
    ],
)
def test_options_out_of_range(wrong: dict) -> None:
    with pytest.raises(UsageError):
        SamplingOptions(**wrong)
