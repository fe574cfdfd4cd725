"""Linear against float64, at every instruction-set level and on both sides of its row thresholds."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import BFLOAT16, Operator, bf16, f64, run

DTYPES = (np.dtype(np.float32), BFLOAT16)
# With bf16_activations: above so many rows a bfloat16 weight meets rounded activations
# (kernels/math/linear.h).
EXACT_ROWS = 4


def unit_of(rows: int, dtype: np.dtype, rounding: int) -> float:
    """The relative rounding of an activation."""
    if not rounding or dtype != BFLOAT16 or rows <= EXACT_ROWS:
        return 0.0
    return 2.0**-8


def bound(x: np.ndarray, weight: np.ndarray, unit: float) -> np.ndarray:
    """Largest error of each output: rounding of x by `unit`, and of the running sum.

    The instruction for rounded x also takes subnormal numbers (below 2^-126) as zero.
    """
    x, weight = np.abs(f64(x)), np.abs(f64(weight))
    inputs = x.shape[-1]
    relative = inputs * 2.0**-24 + unit + 2.0**-23
    flushed = 2.0**-126 * (x.sum(-1, keepdims=True) + weight.sum(-1) + 2 * inputs)
    return x @ weight.T * relative + (2 * flushed if unit else 1e-44 * inputs)


def check(x: np.ndarray, weight: np.ndarray) -> None:
    exact = f64(x) @ f64(weight).T
    for rounding in (1, 0):
        given = {"x": x, "weight": weight}
        (out,) = run("Linear", given, {"out": np.float32}, bf16_activations=rounding)
        assert out.shape == (*x.shape[:-1], weight.shape[0])
        unit = unit_of(int(np.prod(x.shape[:-1])), weight.dtype, rounding)
        assert np.all(np.abs(out - exact) <= bound(x, weight, unit))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 64, 48),
        (3, 37, 5),
        (5, 20, 8),
        (8, 33, 17),
        (9, 1, 1),
        (17, 31, 9),
        (33, 96, 40),
        (70, 129, 23),
    ],
)
def test_matches_float64(level, rng, dtype, rows, inputs, outputs):
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    check(x, rng.standard_normal((outputs, inputs)).astype(dtype))


def test_many_tiles_and_cache_blocks(level, rng):
    x = rng.standard_normal((161, 1100)).astype(np.float32)
    check(x, bf16(rng.standard_normal((300, 1100))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_are_rows(rng, dtype):
    check(
        rng.standard_normal((2, 3, 4, 20)).astype(np.float32),
        rng.standard_normal((7, 20)).astype(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [4, 7, 40])
def test_large_tiny_and_subnormal_values(level, rng, dtype, rows):
    x = rng.standard_normal((rows, 50)).astype(np.float32)
    x *= np.exp2(rng.integers(-60, 60, (rows, 1))).astype(np.float32)
    x[0] = 1e-41
    check(
        x, (rng.standard_normal((19, 50)) * np.exp2(rng.integers(-30, 30, (19, 1)))).astype(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 6, 20])
def test_infinity_and_nan_stay_in_their_row(level, rng, dtype, rows):
    x = np.ones((rows, 18), np.float32)
    x[0, 3], x[1, 17] = np.inf, np.nan
    (out,) = run("Linear", {"x": x, "weight": np.ones((11, 18), dtype)}, {"out": np.float32})
    assert np.all(np.isposinf(out[0]))
    assert np.all(np.isnan(out[1]))
    np.testing.assert_array_equal(out[2:], 18.0)


@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 8, 0), (2, 0, 4), (12, 0, 4)])
def test_empty_dimensions(shape):
    rows, inputs, outputs = shape
    x, weight = np.ones((rows, inputs), np.float32), bf16(np.ones((outputs, inputs)))
    (out,) = run("Linear", {"x": x, "weight": weight}, {"out": np.float32})
    np.testing.assert_array_equal(out, np.full((rows, outputs), inputs, np.float32))


def test_rows_do_not_influence_each_other(level, rng):
    operator_inputs = {
        "x": rng.standard_normal((40, 64)).astype(np.float32),
        "weight": bf16(rng.standard_normal((24, 64))),
    }
    operator = Operator("Linear", operator_inputs, {"out": np.float32})
    (whole,) = operator(operator_inputs)
    (part,) = operator({**operator_inputs, "x": operator_inputs["x"][10:30]})
    np.testing.assert_array_equal(part, whole[10:30])


def test_inputs_that_do_not_fit_are_refused():
    x = np.ones((2, 8), np.float32)
    with pytest.raises(Exception, match=r"hybridge\.Linear: input x: .*8 on axis 1, not 9"):
        run("Linear", {"x": x, "weight": np.ones((4, 9), np.float32)}, {"out": np.float32})
    with pytest.raises(Exception, match=r"input weight: has element type int32.*pass float32 or"):
        run("Linear", {"x": x, "weight": np.ones((4, 8), np.int32)}, {"out": np.float32})
