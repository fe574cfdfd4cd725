"""KdaRecurrence against an fp64 loop: chunks, single steps, unbounded decays, ragged batches."""

from __future__ import annotations

import numpy as np
import pytest

from . import kda_reference
from .harness import f64, i32, run

# One fp32 rounding is 6e-8. An output sums K products whose factors carry about 20 roundings (the
# exponents up to 60 add 2^-19 of their own: 4e-6), and errors in the state decay with it; the
# outputs here are of order 1. Measured: below 1e-5.
TOLERANCE = 4e-5


def inputs(rng, query_start, context_len, state_slot, *, heads=2, key=16, value=16, slots=6):
    tokens = query_start[-1] + 2  # two padding tokens
    unit = lambda *shape: kda_reference.l2_normalise(rng.standard_normal(shape))  # noqa: E731
    return {
        "query": unit(tokens, heads, key).astype(np.float32),
        "key": unit(tokens, heads, key).astype(np.float32),
        "value": rng.standard_normal((tokens, heads, value)).astype(np.float32),
        "log_decay": -rng.gamma(1.0, 1.0, (tokens, heads, key)).astype(np.float32),
        "beta": rng.random((tokens, heads)).astype(np.float32),
        "state": rng.standard_normal((slots, heads, key, value)).astype(np.float32),
        "query_start": i32(query_start),
        "context_len": i32(context_len),
        "state_slot": i32(state_slot),
    }


def call(arrays):
    return run(
        "KdaRecurrence",
        arrays,
        {"output": np.float32, "state_out": np.float32},
        alias={"state_out": "state"},
    )[0]


def expect_like_reference(arrays, tolerance=TOLERANCE):
    wide = {name: f64(a) if a.dtype == np.float32 else a for name, a in arrays.items()}
    before = arrays["state"].copy()
    expected, states = kda_reference.recurrence(**wide)
    output = call(arrays)
    np.testing.assert_allclose(output, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(arrays["state"], states, rtol=0, atol=tolerance)
    used = [s for s in arrays["state_slot"] if s >= 0]
    untouched = np.setdiff1d(np.arange(len(before)), used)
    np.testing.assert_array_equal(arrays["state"][untouched], before[untouched])
    return output


def test_ragged_batch(level, rng):
    """Lengths around every boundary; fresh, continued, empty and inactive sequences; padding."""
    lengths = [1, 3, 16, 0, 37, 5, 4]
    query_start = [0, *np.cumsum(lengths)]
    arrays = inputs(rng, query_start, [0, 7, 9, 3, 0, 2, 8], [2, 0, 5, 1, 3, -1, 4], slots=7)
    before = arrays["state"].copy()
    output = expect_like_reference(arrays)
    assert not output[query_start[5] : query_start[6]].any()
    assert not output[query_start[-1] :].any()
    np.testing.assert_array_equal(arrays["state"][1], before[1])


@pytest.mark.parametrize(("key", "value"), [(128, 128), (20, 33), (1, 1), (16, 8)])
def test_widths(level, rng, key, value):
    expect_like_reference(inputs(rng, [0, 19], [4], [1], key=key, value=value))


def test_unbounded_decay_keeps_every_exponent_safe(level, rng):
    """Single tokens that wipe the state, in the middle of runs that keep it."""
    arrays = inputs(rng, [0, 64], [4], [1], key=32)
    decay = arrays["log_decay"]
    decay *= 0.01
    decay[5] = -300.0
    decay[21, :, ::3] = -1e30
    decay[22, :, 1::3] = -np.inf
    decay[30:40] = -17.0
    decay[50:] = 0.0
    output = expect_like_reference(arrays)
    assert np.isfinite(output).all()


def test_lower_bound_everywhere(level, rng):
    """The strongest decay of variant B, -5 a token: a chunk of 16 spans exp(-75)."""
    arrays = inputs(rng, [0, 48], [4], [1], key=128)
    arrays["log_decay"][:] = -5.0
    expect_like_reference(arrays)


def test_no_decay_and_full_strength(level, rng):
    arrays = inputs(rng, [0, 100], [4], [1], key=16)
    arrays["log_decay"][:] = 0.0
    arrays["beta"][:] = 1.0
    expect_like_reference(arrays, tolerance=2e-4)  # nothing forgets: errors add over 100 tokens


def test_zeros_and_denormals(level, rng):
    arrays = inputs(rng, [0, 20], [4], [1])
    arrays["key"][:10] = 0.0
    arrays["value"][5:] = 1e-40
    arrays["state"][:] = 1e-39
    expect_like_reference(arrays, tolerance=1e-44)


def test_nan_stays_behind_its_token(level, rng):
    arrays = inputs(rng, [0, 32], [4], [1])
    arrays["log_decay"][9, 1, 3] = np.nan
    output = call(arrays)
    assert np.isfinite(output[:9]).all()
    assert np.isfinite(output[:32, 0]).all()
    assert np.isnan(output[9:32, 1]).all()


def test_no_tokens(level, rng):
    arrays = inputs(rng, [0, 0], [0], [1])
    arrays = {k: (a[:0] if k in ("query", "key", "value", "log_decay", "beta") else a)
              for k, a in arrays.items()}  # fmt: skip
    before = arrays["state"].copy()
    assert call(arrays).shape == (0, 2, 16)
    np.testing.assert_array_equal(arrays["state"], before)


@pytest.mark.parametrize("sizes", [{"heads": 0}, {"key": 0}, {"value": 0}])
def test_no_heads_or_no_channels_are_refused(rng, sizes):
    """Such arrays have no memory to copy from or to clear (under `make sanitize`)."""
    arrays = inputs(rng, [0, 3, 5], [0, 4], [1, -1], **sizes)
    with pytest.raises(Exception, match=r"input state: shape .* has no heads or no channels"):
        call(arrays)


def test_state_in_another_buffer_is_copied(level, rng):
    """Without the alias bound, onnxruntime allocates the output: the input must not be needed."""
    arrays = inputs(rng, [0, 5], [4], [1])
    wide = {name: f64(a) if a.dtype == np.float32 else a for name, a in arrays.items()}
    expected, states = kda_reference.recurrence(**wide)
    output, state = run("KdaRecurrence", arrays, {"output": np.float32, "state_out": np.float32})
    np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(state, states, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state_slot": i32([1, 1])}, "input state_slot: 1 at index 1 is used twice"),
        ({"state_slot": i32([1, 6])}, "input state_slot: 6 at index 1 is outside the 6"),
        ({"state_slot": i32([-2, 1])}, "input state_slot: -2 at index 0 is outside"),
        ({"query_start": i32([0, 9, 4])}, "input query_start: falls from 9 to 4"),
        ({"query_start": i32([0, 3, 99])}, "input query_start: ends at 99, beyond the 7 tokens"),
        ({"state": np.zeros((6, 2, 16, 15), np.float32)}, "input state: shape"),
        ({"beta": np.zeros((7, 3), np.float32)}, "input beta: shape"),
        ({"key": np.zeros((7, 2, 17), np.float32)}, "input key: shape"),
    ],
)
def test_bad_inputs_are_named(rng, change, message):
    arrays = inputs(rng, [0, 3, 5], [4, 1], [1, 2]) | change
    before = arrays["state"].copy()
    with pytest.raises(Exception, match="KdaRecurrence") as raised:
        call(arrays)
    assert message in str(raised.value)
    np.testing.assert_array_equal(arrays["state"], before)
