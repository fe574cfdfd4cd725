"""RmsNorm against float64."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import BFLOAT16, f64, run


def norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return run("RmsNorm", {"x": x, "weight": weight}, {"out": np.float32}, eps=eps)[0]


def expected(x: np.ndarray, weight: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    wide = f64(x)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * f64(weight)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (70, 999)])
def test_matches_float64(level, rng, dtype, shape):
    x = rng.standard_normal(shape).astype(np.float32) * 3
    weight = rng.standard_normal(shape[-1]).astype(dtype)
    np.testing.assert_allclose(norm(x, weight), expected(x, weight), rtol=2e-6, atol=1e-12)


def test_extreme_rows(level):
    x = np.zeros((4, 40), np.float32)
    x[1], x[2], x[3] = 1e-30, 1e17, 1e-41
    weight = np.ones(40, np.float32)
    np.testing.assert_allclose(norm(x, weight), expected(x, weight), rtol=2e-6, atol=1e-44)


def test_no_rows(level):
    assert norm(np.ones((0, 8), np.float32), np.ones(8, np.float32)).shape == (0, 8)


def test_what_does_not_fit_is_refused():
    with pytest.raises(Exception, match=r"hybridge\.RmsNorm: input weight: .*not 8 \(last dim"):
        norm(np.ones((2, 8), np.float32), np.ones(9, np.float32))
    with pytest.raises(Exception, match=r"hybridge\.RmsNorm: attribute eps: 0 is not a finite"):
        norm(np.ones((2, 8), np.float32), np.ones(8, np.float32), eps=0.0)
    inputs = {"x": np.ones((2, 8), np.float32), "weight": np.ones(8, np.float32)}
    with pytest.raises(Exception, match=r"hybridge\.RmsNorm: attribute eps: is missing"):
        run("RmsNorm", inputs, {"out": np.float32})
