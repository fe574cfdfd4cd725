"""Operators on weights in bf12 rows: against float64, and against the same weights in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

from hybridge.ops.packed_rows import pack_rows

from . import test_kda_layer, test_linear, test_moe
from .harness import BFLOAT16, bf16, f64, run


def packed(weight: np.ndarray) -> np.ndarray:
    return pack_rows(weight.view(np.uint16))


def linear(x: np.ndarray, weight: np.ndarray, rounding: int = 0) -> np.ndarray:
    given = {"x": x, "weight": packed(weight)}
    return run("LinearPacked", given, {"out": np.float32}, bf16_activations=rounding)[0]


def check(x: np.ndarray, weight: np.ndarray) -> None:
    exact = f64(x) @ f64(weight).T
    for rounding in (1, 0):
        unit = test_linear.unit_of(len(x), BFLOAT16, rounding)
        out = linear(x, weight, rounding)
        assert np.all(np.abs(out - exact) <= test_linear.bound(x, weight, unit))


def awkward(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Weights of many scales by row, with zeros of both signs and exceptions of both kinds."""
    values = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-40, 40, (rows, 1)))
    values[rng.random(values.shape) < 0.1] = 0.0
    values[rng.random(values.shape) < 0.1] = -0.0
    for row in values:
        at = rng.choice(columns, 6, replace=False)
        row[at[:3]] *= 2.0**20
        row[at[3:]] *= 2.0**-30
    return bf16(values)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 8, 9, 17, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 128), (37, 256), (16, 640), (300, 384)])
def test_linear_matches_float64(level, rng, rows, outputs, inputs):
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    check(x, awkward(rng, outputs, inputs))


@pytest.mark.parametrize("scale", [-120, -60, 60, 100])
def test_linear_with_rows_of_any_size(level, rng, scale):
    """Rows of x are scaled to meet the weights; what that loses is below the rounding of sums."""
    x = (rng.standard_normal((3, 256)) * 2.0**scale).astype(np.float32)
    check(x, bf16(rng.standard_normal((20, 256)) * 2.0 ** np.clip(-scale, -20, 20)))


def test_linear_many_tasks(level, rng):
    x = rng.standard_normal((2, 512)).astype(np.float32)
    check(x, bf16(rng.standard_normal((2500, 512))))


def test_infinity_and_nan_stay_in_their_row(level, rng):
    x = np.ones((3, 128), np.float32)
    x[0, 3], x[1, 17] = np.inf, np.nan
    out = linear(x, bf16(np.ones((11, 128))))
    assert np.all(np.isposinf(out[0]))
    assert np.all(np.isnan(out[1]))
    np.testing.assert_array_equal(out[2], 128.0)


def test_infinite_and_subnormal_weights(level):
    weight = bf16(np.ones((4, 128)))
    weight[0, 5], weight[1, 6], weight[2, 7] = np.inf, np.nan, 1e-40
    out = linear(np.ones((1, 128), np.float32), weight)[0]
    assert np.isposinf(out[0])
    assert np.isnan(out[1])
    np.testing.assert_array_equal(out[2:], [127.0, 128.0])


@pytest.mark.parametrize("rows", [1, 3, 6, 20])
def test_damaged_bytes_touch_nothing_outside(level, rng, rows):
    """Any bytes give some numbers: an exception outside the row is passed over."""
    weight = rng.integers(0, 256, (33, 448), np.uint8)
    weight[:, -63] = 255
    weight[:, -60:] = 255
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    (out,) = run("LinearPacked", {"x": x, "weight": weight}, {"out": np.float32})
    assert out.shape == (rows, 33)


@pytest.mark.parametrize(("rows", "outputs"), [(0, 4), (3, 0)])
def test_empty_dimensions(rows, outputs):
    out = linear(np.ones((rows, 128), np.float32), bf16(np.ones((outputs, 128))))
    assert out.shape == (rows, outputs)


def test_rows_that_do_not_fit_are_refused():
    x = np.ones((2, 256), np.float32)
    with pytest.raises(Exception, match=r"LinearPacked: input weight: .*447 on axis 1, not 448"):
        run("LinearPacked", {"x": x, "weight": np.zeros((4, 447), np.uint8)}, {"out": np.float32})
    with pytest.raises(Exception, match=r"input weight: its rows would have 100 columns; remedy"):
        run("LinearPacked", {"x": x[:, :100], "weight": np.zeros((4, 448), np.uint8)},
            {"out": np.float32})  # fmt: skip


@pytest.mark.parametrize("full_gate", [True, False])
@pytest.mark.parametrize("sequences", [1, 3, 6, 11])
def test_kda_decode_equals_that_of_bfloat16(level, rng, full_gate, sequences):
    slots = rng.permutation(sequences + 1)[:sequences].tolist()
    arrays = test_kda_layer.decode_inputs(
        rng, ([0, 4, 2, 1, 0, 9] * 2)[:sequences], slots, heads=4, width=32, hidden=256, rank=8,
        full_gate=full_gate, weights=BFLOAT16,
    )  # fmt: skip
    twins = {name: None if a is None else a.copy() for name, a in arrays.items()}
    for name in ("in_weight", "o_weight"):
        twins[name] = packed(arrays[name])
    outputs = {"output": np.float32, "conv_out": np.float32, "state_out": np.float32}
    alias = {"conv_out": "conv_state", "state_out": "state"}
    attributes = {"norm_eps": 1e-5, "lower_bound": -5.0}
    (want,) = run("KdaDecode", arrays, outputs, alias=alias, **attributes)
    (got,) = run("KdaDecodePacked", twins, outputs, alias=alias, **attributes)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    for name in ("conv_state", "state"):
        np.testing.assert_allclose(twins[name], arrays[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rounding", [0, 1])
@pytest.mark.parametrize("tokens", [0, 1, 3, 9, 40])
def test_experts_equal_those_of_bfloat16(level, rng, tokens, rounding):
    arrays = test_moe.draw(rng, tokens, 5, 2, 256, 128)
    arrays |= {name: bf16(arrays[name]) for name in ("gate_up", "down")}
    twins = arrays | {name: packed(arrays[name]) for name in ("gate_up", "down")}
    attributes = {**test_moe.SITU, "bf16_activations": rounding}
    (want,) = run("MoeExperts", arrays, {"output": np.float32}, **attributes)
    (got,) = run("MoeExpertsPacked", twins, {"output": np.float32}, **attributes)
    # Few rows differ in the order of sums alone; many meet the same panels, bit for bit.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(initial=0.0))


@pytest.mark.parametrize("tokens", [15, 30])  # each expert gets about 6 or 12 of them
def test_experts_with_rounded_rows(level, rng, tokens):
    arrays = test_moe.draw(rng, tokens, 5, 2, 256, 128)
    weights = {name: bf16(arrays[name]) for name in ("gate_up", "down")}
    arrays |= {name: packed(array) for name, array in weights.items()}
    wide = {name: f64(array) for name, array in weights.items()}
    test_moe.expect_experts(
        "MoeExpertsPacked", level, arrays, **wide, weights=BFLOAT16, **test_moe.SITU
    )
