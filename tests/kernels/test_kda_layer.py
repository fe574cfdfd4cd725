"""KdaPrefill and KdaDecode against fp64: convolution, gates, carried state, both weight types."""

from __future__ import annotations

import numpy as np
import pytest

from . import kda_reference
from .harness import BFLOAT16, bf16, f64, i32, run

# Outputs are of order 1, sums of at most 200 fp32 products (6e-8 each) through a handful of
# elementary functions good to 2 ulp; the state accumulates over the sequence.
TOLERANCE = 5e-5
BOUNDS = (None, -5.0)


def gate_inputs(rng, heads, width, taps, slots):
    channels = heads * width
    return {
        "conv_weight": rng.standard_normal((3 * channels, taps)).astype(np.float32),
        "a_log": rng.uniform(-1, 1, heads).astype(np.float32),
        "dt_bias": rng.standard_normal(channels).astype(np.float32),
        "conv_state": rng.standard_normal((slots, 3 * channels, taps - 1)).astype(np.float32),
        "state": rng.standard_normal((slots, heads, width, width)).astype(np.float32),
    }


def prefill_inputs(rng, lengths, context_len, state_slot, *, heads=2, width=16, taps=4, pad=1):
    query_start = [0, *np.cumsum(lengths, dtype=int)]
    tokens, channels = query_start[-1] + pad, heads * width
    shared = gate_inputs(rng, heads, width, taps, max(*state_slot, 0) + 2)
    return {
        "qkv": rng.standard_normal((tokens, 3 * channels)).astype(np.float32),
        "gate": rng.standard_normal((tokens, channels)).astype(np.float32),
        "beta": rng.standard_normal((tokens, heads)).astype(np.float32),
        **shared,
        "query_start": i32(query_start),
        "context_len": i32(context_len),
        "state_slot": i32(state_slot),
    }


def widened(arrays):
    floats = (np.float32, BFLOAT16)
    return {n: f64(a) if a is not None and a.dtype in floats else a for n, a in arrays.items()}


def call(op, arrays, lower_bound, **attributes):
    if lower_bound is not None:
        attributes["lower_bound"] = lower_bound
    return run(
        op,
        arrays,
        {"output": np.float32, "conv_out": np.float32, "state_out": np.float32},
        alias={"conv_out": "conv_state", "state_out": "state"},
        **attributes,
    )[0]


def expect_like_reference(op, reference, arrays, lower_bound, *, tolerance=TOLERANCE, **attributes):
    expected, histories, states = reference(
        **widened(arrays), lower_bound=lower_bound, **attributes
    )
    output = call(op, arrays, lower_bound, **attributes)
    np.testing.assert_allclose(output, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(arrays["conv_state"], histories, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(arrays["state"], states, rtol=0, atol=tolerance)
    return output


def expect_prefill(arrays, lower_bound, **options):
    return expect_like_reference(
        "KdaPrefill", kda_reference.prefill, arrays, lower_bound, **options
    )


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_prefill_ragged(level, rng, lower_bound):
    """Sequences shorter than the convolution, longer than chunks, empty, inactive; padding."""
    arrays = prefill_inputs(rng, [1, 2, 35, 0, 6, 16], [0, 5, 9, 1, 2, 0], [3, 0, 4, 1, -1, 2])
    output = expect_prefill(arrays, lower_bound)
    assert not output[38:44].any()
    assert not output[-1].any()


@pytest.mark.parametrize(("heads", "width", "taps"), [(1, 128, 4), (3, 20, 2), (2, 4, 1)])
def test_prefill_widths(level, rng, heads, width, taps):
    arrays = prefill_inputs(rng, [21], [3], [0], heads=heads, width=width, taps=taps)
    expect_prefill(arrays, -5.0)


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_prefill_extreme_values(level, rng, lower_bound):
    """Gates far outside exp's range, all-zero and huge projections, denormals."""
    arrays = prefill_inputs(rng, [40], [3], [0])
    arrays["gate"][3] = 1e30
    arrays["gate"][9] = -1e30
    arrays["gate"][12:20] = 60.0
    arrays["beta"][4], arrays["beta"][5] = 1e30, -1e30
    arrays["qkv"][7] = 0.0
    arrays["qkv"][15:22] = 0.0
    arrays["qkv"][25] = 1e-40
    arrays["qkv"][30, :64] = 1e6  # q and k are normalised; v stays small
    output = expect_prefill(arrays, lower_bound)
    assert np.isfinite(output).all()


def test_prefill_in_pieces_equals_one_call(level, rng):
    whole = prefill_inputs(rng, [29], [0], [0], pad=0)
    pieces = {name: array.copy() for name, array in whole.items()}
    expected = call("KdaPrefill", whole, -5.0)
    done, outputs = 0, []
    for length in (1, 2, 16, 10):
        part = pieces | {
            name: pieces[name][done : done + length] for name in ("qkv", "gate", "beta")
        }
        part |= {"query_start": i32([0, length]), "context_len": i32([done])}
        outputs.append(call("KdaPrefill", part, -5.0))
        done += length
    np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(pieces["state"], whole["state"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(pieces["conv_state"], whole["conv_state"])


def decode_inputs(rng, context_len, state_slot, *, heads=2, width=16, hidden=24, rank=8,
                  full_gate=False, weights=np.float32):  # fmt: skip
    channels = heads * width
    rows = 3 * channels + rank + heads + (channels if full_gate else rank)
    scaled = lambda *shape: (  # noqa: E731
        rng.standard_normal(shape) / np.sqrt(shape[-1])
    ).astype(weights)
    shared = gate_inputs(rng, heads, width, 4, max(*state_slot, 0) + 2)
    caches = {name: shared.pop(name) for name in ("conv_state", "state")}
    return {
        "x": rng.standard_normal((len(state_slot), hidden)).astype(np.float32),
        "in_weight": scaled(rows, hidden),
        "f_b_weight": scaled(channels, rank),
        "g_b_weight": None if full_gate else scaled(channels, rank),
        **shared,
        "norm_weight": rng.standard_normal(width).astype(np.float32),
        "o_weight": scaled(hidden, channels),
        **caches,
        "context_len": i32(context_len),
        "state_slot": i32(state_slot),
    }


def expect_decode(arrays, lower_bound):
    # The output norm divides by the rms of o, which may be small: errors grow by that factor.
    return expect_like_reference(
        "KdaDecode", kda_reference.decode, arrays, lower_bound, tolerance=2e-4, norm_eps=1e-5
    )


@pytest.mark.parametrize("lower_bound", BOUNDS)
@pytest.mark.parametrize("full_gate", [False, True])
@pytest.mark.parametrize("weights", [np.float32, BFLOAT16])
def test_decode(level, rng, lower_bound, full_gate, weights):
    arrays = decode_inputs(
        rng, [0, 5, 3, 1, 9, 0], [2, 0, -1, 3, 5, 4], full_gate=full_gate, weights=weights
    )
    before = arrays["state"].copy()
    output = expect_decode(arrays, lower_bound)
    assert not output[2].any()
    np.testing.assert_array_equal(arrays["state"][1], before[1])


@pytest.mark.parametrize(("heads", "width", "hidden"), [(1, 128, 64), (3, 20, 37), (5, 1, 3)])
def test_decode_widths(level, rng, heads, width, hidden):
    expect_decode(
        decode_inputs(rng, [4], [1], heads=heads, width=width, hidden=hidden, rank=5), -5.0
    )


def test_decode_mixed_weight_types(level, rng):
    arrays = decode_inputs(rng, [4, 0], [1, 0])
    arrays["in_weight"] = bf16(arrays["in_weight"])
    arrays["g_b_weight"] = bf16(arrays["g_b_weight"])
    expect_decode(arrays, None)


@pytest.mark.parametrize("rows", [3, 6, 11])
@pytest.mark.parametrize("weights", [np.float32, BFLOAT16])
def test_decode_with_rounded_activations(level, rng, rows, weights):
    """With o_weight = 1 the output is what the last product rounds, within half a bfloat16 step.

    Rows of x hold bfloat16 numbers already, so that the first product rounds nothing.
    """
    slots = list(range(rows))
    arrays = decode_inputs(rng, [2] * rows, slots, hidden=32, weights=weights)
    arrays["x"] = f64(bf16(arrays["x"])).astype(np.float32)
    arrays["o_weight"] = np.eye(32).astype(weights)
    expected, _, states = kda_reference.decode(**widened(arrays), lower_bound=-5.0, norm_eps=1e-5)
    output = call("KdaDecode", arrays, -5.0, norm_eps=1e-5, bf16_activations=1)
    rounds = weights == BFLOAT16 and rows > 4 and level == "avx512_bf16"
    assert np.any(output != f64(bf16(output))) != rounds
    np.testing.assert_allclose(output, expected, rtol=2.0**-8 if rounds else 0, atol=2e-4)
    np.testing.assert_allclose(arrays["state"], states, rtol=0, atol=TOLERANCE)


def test_decode_no_rows(level, rng):
    arrays = decode_inputs(rng, [4], [1])
    arrays |= {name: arrays[name][:0] for name in ("x", "context_len", "state_slot")}
    assert call("KdaDecode", arrays, None, norm_eps=1e-5).shape == (0, 24)


def test_decode_continues_prefill(level, rng):
    """The state that prefill leaves is the one that decode reads."""
    arrays = decode_inputs(rng, [0], [0], full_gate=True)
    sequence = rng.standard_normal((9, 24)).astype(np.float32)
    wide = widened(arrays)
    for step, x in enumerate(sequence):
        call("KdaDecode", arrays | {"x": x[None], "context_len": i32([step])}, -5.0, norm_eps=1e-5)
    parts = sequence.astype(np.float64) @ wide["in_weight"].T
    qkv, low, beta, _ = np.split(parts, np.cumsum([96, 8, 2]), axis=1)
    names = ("conv_weight", "a_log", "dt_bias")
    caches = {name: np.zeros_like(arrays[name]) for name in ("conv_state", "state")}
    prefill = {"qkv": qkv, "gate": low @ wide["f_b_weight"].T, "beta": beta}
    prefill = {name: a.astype(np.float32) for name, a in prefill.items()}
    prefill |= {name: arrays[name] for name in names} | caches
    prefill |= {"query_start": i32([0, 9]), "context_len": i32([0]), "state_slot": i32([0])}
    call("KdaPrefill", prefill, -5.0)
    np.testing.assert_allclose(arrays["state"][0], caches["state"][0], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(arrays["conv_state"][0], caches["conv_state"][0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_slot": i32([0, 0])}, "input state_slot: 0 at index 1 is used twice"),
        ({"state_slot": i32([0, 9])}, "input state_slot: 9 at index 1 is outside"),
        ({"context_len": i32([0, -3])}, "input context_len: -3 at index 1"),
        ({"g_b_weight": None}, "input in_weight: shape"),
        ({"conv_state": np.zeros((3, 96, 4), np.float32)}, "input conv_state: shape"),
        ({"a_log": np.zeros(3, np.float32)}, "input a_log: shape"),
        ({"x": np.zeros((2, 25), np.float32)}, "input in_weight: shape"),
        ({"conv_weight": bf16(np.zeros((96, 4)))}, "input parameter (conv_weight)"),
    ],
)
def test_decode_bad_inputs_are_named(rng, change, message):
    arrays = decode_inputs(rng, [4, 1], [1, 0]) | change
    with pytest.raises(Exception, match="KdaDecode") as raised:
        call("KdaDecode", arrays, None, norm_eps=1e-5)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_slot": i32([0, 0])}, "input state_slot: 0 at index 1 is used twice"),
        ({"query_start": i32([0, 1, 99])}, "input query_start: ends at 99"),
        ({"gate": np.zeros((6, 31), np.float32)}, "input gate: shape"),
        ({"dt_bias": np.zeros(31, np.float32)}, "input dt_bias: shape"),
        ({"state": np.zeros((3, 2, 16, 15), np.float32)}, "input state: shape"),
    ],
)
def test_prefill_bad_inputs_are_named(rng, change, message):
    arrays = prefill_inputs(rng, [2, 3], [0, 1], [1, 0]) | change
    with pytest.raises(Exception, match="KdaPrefill") as raised:
        call("KdaPrefill", arrays, None)
    assert message in str(raised.value)
