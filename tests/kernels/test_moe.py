"""MoeRoute, MoeExperts and MoeExpertsMxfp4 against fp64, at every instruction-set level."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import BFLOAT16, Operator, bf16, f64, i32, run
from .kda_reference import sigmoid

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SITU = {"activation": "situ", "beta": 4.0, "linear_beta": 25.0}
SILU = {"activation": "silu"}


# ---- Router ---------------------------------------------------------------------------------------


def route_reference(x, gate_weight, bias, top_k, renormalize, scale):
    scores = sigmoid(f64(x) @ f64(gate_weight).T)
    ids = np.argsort(-(scores + f64(bias)), axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if renormalize:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    return ids, weights * scale


def route(x, gate_weight, bias, top_k, *, renormalize=True, scale=1.0):
    return run(
        "MoeRoute",
        {"x": x, "gate_weight": gate_weight, "bias": bias},
        {"expert_ids": np.int32, "expert_weights": np.float32},
        top_k=top_k,
        renormalize=int(renormalize),
        scale=float(scale),
    )


@pytest.mark.parametrize("weights", [np.float32, BFLOAT16])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 8, 8), (7, 37, 5),
                                                          (70, 64, 4)])  # fmt: skip
def test_route(level, rng, weights, tokens, experts, top_k):
    x = rng.standard_normal((tokens, 45)).astype(np.float32)
    gate_weight = rng.standard_normal((experts, 45)).astype(weights)
    bias = rng.standard_normal(experts).astype(np.float32)
    for renormalize, scale in ((True, 2.5), (False, 1.0)):
        ids, chosen = route(x, gate_weight, bias, top_k, renormalize=renormalize, scale=scale)
        expected_ids, expected = route_reference(x, gate_weight, bias, top_k, renormalize, scale)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(chosen, expected, rtol=2e-5, atol=1e-7)


def test_route_ties_go_to_the_lowest_id(level):
    """Zero input: every score is exactly 1/2, so the bias alone decides and equal ones keep order."""
    bias = np.float32([0, 1, 0, 1, -1, 1, 0])
    ids, weights = route(np.zeros((3, 5), np.float32), np.ones((7, 5), np.float32), bias, 5)
    np.testing.assert_array_equal(ids, np.tile([1, 3, 5, 0, 2], (3, 1)))
    np.testing.assert_allclose(weights, 0.2, rtol=1e-6)


def test_route_bias_stays_out_of_the_weights(level):
    x = np.float32([[1.0]])
    ids, weights = route(x, np.float32([[3.0], [-3.0]]), np.float32([0.0, 10.0]), 2)
    np.testing.assert_array_equal(ids, [[1, 0]])
    np.testing.assert_allclose(weights, [[sigmoid(-3.0), sigmoid(3.0)]], rtol=1e-6)


def test_route_extreme_scores(level):
    """All scores underflow: the weights stay finite; a NaN score is chosen last, ids stay distinct."""
    x = np.float32([[1.0]])
    _, weights = route(x, np.full((4, 1), -1e4, np.float32), np.zeros(4, np.float32), 2)
    assert np.isfinite(weights).all()
    gate = np.float32([[np.nan], [1.0], [np.nan], [2.0]])
    ids, _ = route(x, gate, np.zeros(4, np.float32), 4)
    np.testing.assert_array_equal(ids, [[3, 1, 0, 2]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((2, 4)), np.zeros((3, 4)), np.zeros(3), 4), "attribute top_k: 4 is more than"),
        ((np.zeros((2, 4)), np.zeros((3, 5)), np.zeros(3), 2), "input gate_weight: shape"),
        ((np.zeros((2, 4)), np.zeros((3, 4)), np.zeros(4), 2), "input bias: shape"),
        ((np.zeros((2, 4)), np.zeros((3, 4)), np.zeros(3), 0), "attribute top_k: 0 is below 1"),
    ],
)
def test_route_bad_inputs_are_named(arguments, message):
    *arrays, top_k = arguments
    with pytest.raises(Exception, match="MoeRoute") as raised:
        route(*(a.astype(np.float32) for a in arrays), top_k)
    assert message in str(raised.value)


# ---- Experts --------------------------------------------------------------------------------------


def activate(gate, up, *, activation, beta=None, linear_beta=None):
    if activation == "silu":
        return gate * sigmoid(gate) * up
    bounded = beta * np.tanh(gate / beta) * sigmoid(gate)
    return bounded * (up if linear_beta is None else linear_beta * np.tanh(up / linear_beta))


def experts_reference(x, expert_ids, expert_weights, gate_up, down, **activation):
    """The weighted sums [T, L], and for each the sum of absolute terms that bounds its rounding."""
    output, size = np.zeros(x.shape), np.zeros(x.shape)
    for t, ids in enumerate(expert_ids):
        for j, e in enumerate(ids):
            gate, up = np.split(gate_up[e] @ x[t], 2)
            hidden = activate(gate, up, **activation)
            output[t] += expert_weights[t, j] * (down[e] @ hidden)
            # An error in the inner sums reaches every output: bound it by the magnitudes too.
            gates, ups = np.split(np.abs(gate_up[e]) @ np.abs(x[t]), 2)
            carried = np.abs(hidden) + gates * np.minimum(np.abs(up), 25) + ups * np.abs(gate)
            size[t] += np.abs(expert_weights[t, j]) * (np.abs(down[e]) @ carried)
    return output, size


def draw(rng, tokens, experts=6, top_k=3, latent=64, intermediate=32):
    scaled = lambda *shape: rng.standard_normal(shape) / np.sqrt(shape[-1])  # noqa: E731
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)] or
                   [np.zeros(top_k)])[:tokens]  # fmt: skip
    return {
        "x": rng.standard_normal((tokens, latent)).astype(np.float32),
        "expert_ids": i32(ids),
        "expert_weights": rng.random((tokens, top_k)).astype(np.float32),
        "gate_up": scaled(experts, 2 * intermediate, latent).astype(np.float32),
        "down": scaled(experts, latent, intermediate).astype(np.float32),
    }


def relative_error(level, weights, rows, rounding):
    """Of one product: fp32 rounding, or bfloat16 rounding of its left side (2^-9) where that is
    allowed, the machine multiplies bfloat16 pairs and an expert has more than four rows."""
    rounds = rounding and level == "avx512_bf16" and weights != np.float32 and rows > 4
    return 2**-8 if rounds else 1e-6


def expect_experts(op, level, arrays, gate_up, down, weights, **activation):
    wide = {name: f64(arrays[name]) for name in ("x", "expert_weights")}
    expected, size = experts_reference(
        **wide, expert_ids=arrays["expert_ids"], gate_up=gate_up, down=down, **activation
    )
    rows = np.bincount(arrays["expert_ids"].ravel(), minlength=1).max(initial=0)
    for rounding in (1, 0):
        given = {**activation, "bf16_activations": rounding}
        (output,) = run(op, arrays, {"output": np.float32}, **given)
        bound = relative_error(level, weights, rows, rounding) * size + 1e-37
        assert (np.abs(output - expected) <= bound).all()
    return output


@pytest.mark.parametrize("activation", [SITU, SILU, {"activation": "situ", "beta": 2.0}])
@pytest.mark.parametrize("weights", [np.float32, BFLOAT16])
@pytest.mark.parametrize("tokens", [0, 1, 5, 12, 24, 40])  # each expert gets about half of them
def test_experts(level, rng, activation, weights, tokens):
    arrays = draw(rng, tokens)
    arrays |= {name: arrays[name].astype(weights) for name in ("gate_up", "down")}
    expect_experts("MoeExperts", level, arrays, f64(arrays["gate_up"]), f64(arrays["down"]),
                   weights, **activation)  # fmt: skip


@pytest.mark.parametrize("weights", [np.float32, BFLOAT16])
@pytest.mark.parametrize(("latent", "intermediate"), [(37, 21), (1, 1), (130, 67)])
@pytest.mark.parametrize("tokens", [2, 17, 45])
def test_experts_odd_widths(level, rng, weights, latent, intermediate, tokens):
    arrays = draw(rng, tokens, latent=latent, intermediate=intermediate)
    arrays |= {name: arrays[name].astype(weights) for name in ("gate_up", "down")}
    expect_experts("MoeExperts", level, arrays, f64(arrays["gate_up"]), f64(arrays["down"]),
                   weights, **SITU)  # fmt: skip


def test_experts_of_tokens_without_elements(level, rng):
    """Such tokens have no memory to gather from (under `make sanitize`)."""
    arrays = draw(rng, 3) | {"x": np.zeros((3, 0), np.float32)}
    arrays |= {"gate_up": np.zeros((6, 8, 0), np.float32), "down": np.zeros((6, 0, 4), np.float32)}
    assert run("MoeExperts", arrays, {"output": np.float32}, **SITU)[0].shape == (3, 0)


def test_experts_one_expert_for_all_and_twice_for_one(level, rng):
    arrays = draw(rng, 19)
    arrays["expert_ids"][:] = 5
    expect_experts("MoeExperts", level, arrays, f64(arrays["gate_up"]), f64(arrays["down"]),
                   np.float32, **SITU)  # fmt: skip


def test_experts_extreme_values(level, rng):
    arrays = draw(rng, 3)
    arrays["x"][0] *= 1e6
    arrays["x"][1] = 0.0
    arrays["x"][2] *= 1e-30
    output = expect_experts("MoeExperts", level, arrays, f64(arrays["gate_up"]),
                            f64(arrays["down"]), np.float32, **SITU)  # fmt: skip
    assert np.isfinite(output).all()
    assert not output[1].any()


@pytest.mark.parametrize("tokens", [3, 50])
def test_experts_do_not_depend_on_threads(level, rng, tokens):
    arrays = draw(rng, tokens)
    arrays |= {name: bf16(arrays[name]) for name in ("gate_up", "down")}
    one, two, again = (
        Operator("MoeExperts", arrays, {"output": np.float32}, threads=threads, **SITU)(arrays)[0]
        for threads in (1, 2, 2)
    )
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(two, again)


# ---- MXFP4 ----------------------------------------------------------------------------------------


def expand(packed, scale):
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    powers = np.ldexp(1.0, scale.astype(np.int32) - 127)
    return E2M1[nibbles] * np.repeat(powers, 32, axis=-1)


def draw_packed(rng, tokens, low=118, high=124, latent=64, intermediate=32, **options):
    arrays = draw(rng, tokens, latent=latent, intermediate=intermediate, **options)
    for name in ("gate_up", "down"):
        shape = arrays.pop(name).shape
        bytes_shape = (*shape[:-1], shape[-1] // 2)
        arrays[f"{name}_packed"] = rng.integers(0, 256, bytes_shape, np.uint8)
        scales_shape = (*shape[:-1], shape[-1] // 32)
        arrays[f"{name}_scale"] = rng.integers(low, high, scales_shape, np.uint8)
    return arrays


def expect_mxfp4(level, arrays, **activation):
    gate_up = expand(arrays["gate_up_packed"], arrays["gate_up_scale"])
    down = expand(arrays["down_packed"], arrays["down_scale"])
    return expect_experts("MoeExpertsMxfp4", level, arrays, gate_up, down, "mxfp4", **activation)


@pytest.mark.parametrize("activation", [SITU, SILU])
@pytest.mark.parametrize("tokens", [0, 1, 4, 40])
def test_mxfp4(level, rng, activation, tokens):
    expect_mxfp4(level, draw_packed(rng, tokens), **activation)


@pytest.mark.parametrize(("latent", "intermediate"), [(32, 32), (96, 160), (256, 128), (160, 224)])
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_mxfp4_widths(level, rng, latent, intermediate, tokens):
    arrays = draw_packed(rng, tokens, latent=latent, intermediate=intermediate)
    expect_mxfp4(level, arrays, **SITU)


@pytest.mark.parametrize("tokens", [1, 3])
def test_mxfp4_subnormal_scales(level, rng, tokens):
    """A scale byte of 0 is 2^-127, a subnormal: inputs of 2^120 bring it back into range."""
    arrays = draw_packed(rng, tokens, low=0, high=3)
    arrays["x"] = (arrays["x"] * 2.0**120).astype(np.float32)
    arrays["down_scale"][:] = 121
    output = expect_mxfp4(level, arrays, **SITU)
    assert output.any()


@pytest.mark.parametrize("code", [0x00, 0x22])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("width", [64, 256])
def test_mxfp4_scale_255_is_nan(level, rng, tokens, width, code):
    """Whatever the code, and where all products are positive and would sum to infinity."""
    arrays = draw_packed(rng, tokens, latent=width)
    arrays["x"] = np.abs(arrays["x"])
    arrays["gate_up_packed"][:] = 0x22
    arrays["expert_ids"][0] = [0, 1, 2]
    arrays["expert_weights"] = np.abs(arrays["expert_weights"])
    arrays["down_scale"][0, 3] = 255
    arrays["down_packed"][0, 3] = code
    (output,) = run("MoeExpertsMxfp4", arrays, {"output": np.float32}, **SITU)
    chosen = (arrays["expert_ids"] == 0).any(1)
    assert np.isnan(output[chosen, 3]).all()
    assert np.isfinite(output[~chosen]).all()
    assert np.isfinite(np.delete(output, 3, axis=1)).all()


def test_mxfp4_zero_weights(level, rng):
    arrays = draw_packed(rng, 9)
    arrays["gate_up_packed"][:] = 0x80  # +0 and -0
    assert not expect_mxfp4(level, arrays, **SITU).any()


def test_mxfp4_nibble_order(level):
    """One weight of 6 in the odd (second) element of row 0: only x[1] meets it."""
    arrays = {
        "x": np.arange(32, dtype=np.float32)[None],
        "expert_ids": i32([[0]]),
        "expert_weights": np.float32([[1.0]]),
        "gate_up_packed": np.zeros((1, 64, 16), np.uint8),
        "gate_up_scale": np.full((1, 64, 1), 127, np.uint8),
        "down_packed": np.zeros((1, 32, 16), np.uint8),
        "down_scale": np.full((1, 32, 1), 127, np.uint8),
    }
    arrays["gate_up_packed"][0, 0, 0] = 0x70
    arrays["gate_up_packed"][0, 32, 1] = 0x02
    arrays["down_packed"][0, 5, 0] = 0x02
    (output,) = run("MoeExpertsMxfp4", arrays, {"output": np.float32}, **SILU)
    expected = np.zeros(32)
    expected[5] = 6 * sigmoid(6.0) * 2.0
    np.testing.assert_allclose(output[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_ids": i32([[0, 1, 6]])}, "input expert_ids: 6 at index 2 is not one of the 6"),
        ({"expert_ids": i32([[0, -1, 2]])}, "input expert_ids: -1 at index 1"),
        ({"expert_weights": np.ones((1, 2), np.float32)}, "input expert_weights: shape"),
        ({"down": np.ones((6, 64, 31), np.float32)}, "input down: shape"),
        ({"down": bf16(np.ones((6, 64, 32)))}, "input down: is bfloat16 while gate_up is float32"),
        ({"gate_up": np.ones((6, 63, 64), np.float32)}, "an odd number"),
        ({"x": np.ones((1, 65), np.float32)}, "input gate_up: shape"),
    ],
)
def test_experts_bad_inputs_are_named(rng, change, message):
    arrays = draw(rng, 1) | change
    with pytest.raises(Exception, match="MoeExperts") as raised:
        run("MoeExperts", arrays, {"output": np.float32}, **SITU)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up_scale": np.ones((6, 64, 1), np.uint8)}, "input gate_up_scale: shape"),
        ({"down_packed": np.ones((6, 64, 17), np.uint8)}, "input down_packed: shape"),
        ({"x": np.ones((1, 48), np.float32)}, "no multiple of 32"),
    ],
)
def test_mxfp4_bad_inputs_are_named(rng, change, message):
    arrays = draw_packed(rng, 1) | change
    with pytest.raises(Exception, match="MoeExpertsMxfp4") as raised:
        run("MoeExpertsMxfp4", arrays, {"output": np.float32}, **SITU)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"activation": "gelu"}, "attribute activation: 'gelu' is unknown"),
        ({"activation": "situ"}, "attribute beta: is missing"),
        ({"activation": "situ", "beta": 0.0}, "attribute beta: 0 is not"),
        ({"activation": "situ", "beta": 4.0, "linear_beta": -1.0}, "attribute linear_beta: -1"),
    ],
)
def test_bad_attributes_are_named(rng, attributes, message):
    with pytest.raises(Exception, match="MoeExperts") as raised:
        run("MoeExperts", draw(rng, 1), {"output": np.float32}, **attributes)
    assert message in str(raised.value)
