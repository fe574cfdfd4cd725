"""Situ against float64."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import f64, run


def expected(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float | None):
    gate, up = f64(gate), f64(up)
    if linear_beta is not None:
        up = linear_beta * np.tanh(up / linear_beta)
    with np.errstate(over="ignore"):
        return beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * up


def situ(gate: np.ndarray, up: np.ndarray, **attributes: float) -> np.ndarray:
    return run("Situ", {"gate": gate, "up": up}, {"out": np.float32}, **attributes)[0]


@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("shape", [(1,), (3, 17), (2, 5, 100), (90, 301)])
def test_matches_float64(level, rng, linear_beta, shape):
    gate = rng.standard_normal(shape).astype(np.float32) * 8
    up = rng.standard_normal(shape).astype(np.float32) * 40
    attributes = {"beta": 4.0} | ({} if linear_beta is None else {"linear_beta": linear_beta})
    out = situ(gate, up, **attributes)
    np.testing.assert_allclose(out, expected(gate, up, 4.0, linear_beta), rtol=2e-6, atol=1e-30)


def test_extremes(level):
    gate = np.float32([0, -0.0, 1e-41, -80, -1e30, 1e30, np.inf, -np.inf, 0.6249, 0.6251])
    up = np.full_like(gate, 30)
    out = situ(gate, up, beta=4.0, linear_beta=25.0)
    np.testing.assert_allclose(out, expected(gate, up, 4.0, 25.0), rtol=2e-6, atol=1e-32)
    assert np.isnan(situ(np.float32([np.nan]), up[:1], beta=4.0)[0])


def test_what_does_not_fit_is_refused():
    ones = np.ones((2, 8), np.float32)
    with pytest.raises(Exception, match=r"hybridge\.Situ: input up: .*on axis 1, not 8"):
        situ(ones, ones[:, :7].copy(), beta=4.0)
    with pytest.raises(Exception, match=r"attribute linear_beta: -1 is not a finite"):
        situ(ones, ones, beta=4.0, linear_beta=-1.0)
