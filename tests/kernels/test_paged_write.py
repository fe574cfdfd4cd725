"""PagedWrite and StateWrite: rows land in their slots, in place, and bad slots are refused."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import BFLOAT16, Operator, i32, run

DTYPES = (np.dtype(np.float32), BFLOAT16)


def paged_write(cache: np.ndarray, rows: np.ndarray, slots: object) -> None:
    run(
        "PagedWrite",
        {"cache": cache, "rows": rows, "slot_mapping": i32(slots)},
        {"cache_out": cache.dtype},
        alias={"cache_out": "cache"},
    )


def state_write(state: np.ndarray, rows: np.ndarray, slots: object) -> None:
    run(
        "StateWrite",
        {"state": state, "rows": rows, "state_slot": i32(slots)},
        {"state_out": state.dtype},
        alias={"state_out": "state"},
    )


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("rows_dtype", DTYPES)
def test_rows_land_in_their_slots(level, rng, cache_dtype, rows_dtype):
    cache = rng.standard_normal((5, 3, 1, 37)).astype(cache_dtype)
    rows = rng.standard_normal((6, 1, 37)).astype(rows_dtype)
    slots = [14, -1, 0, 7, -1, 3]
    expected = cache.copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            expected.reshape(15, 1, 37)[slot] = row.astype(np.float32).astype(cache_dtype)
    paged_write(cache, rows, slots)
    np.testing.assert_array_equal(cache.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_land_in_their_slots(level, rng, dtype):
    state = rng.standard_normal((4, 2, 3, 5)).astype(dtype)
    rows = rng.standard_normal((3, 2, 3, 5)).astype(np.float32)
    expected = state.copy()
    expected[3], expected[0] = rows[0].astype(dtype), rows[2].astype(dtype)
    state_write(state, rows, [3, -1, 0])
    np.testing.assert_array_equal(state.view(np.uint8), expected.view(np.uint8))


def test_bfloat16_rounds_to_nearest_even_and_keeps_special_values(level):
    values = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -0.0, np.inf, np.nan, 1e-41, 3.4e38])
    cache = np.zeros((1, 1, 7), BFLOAT16)
    paged_write(cache, values[None], [0])
    np.testing.assert_array_equal(cache[0, 0].view(np.uint16), values.astype(BFLOAT16).view("u2"))


def test_many_rows_share_the_threads(rng):
    cache = np.zeros((40, 64, 64), np.float32)
    rows = rng.standard_normal((2000, 64)).astype(np.float32)
    slots = rng.permutation(2560)[:2000]
    paged_write(cache, rows, slots)
    np.testing.assert_array_equal(cache.reshape(2560, 64)[slots], rows)


def test_no_rows_change_nothing():
    cache = np.ones((2, 2, 3), np.float32)
    paged_write(cache, np.ones((0, 3), np.float32), np.zeros(0))
    np.testing.assert_array_equal(cache, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_elements(level, dtype):
    """Nothing to write, and a cache that has no memory (under `make sanitize`)."""
    cache = np.zeros((2, 3, 0), dtype)
    paged_write(cache, np.zeros((2, 0), dtype), [4, -1])
    state_write(cache, np.zeros((2, 3, 0), dtype), [1, 0])


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 6], r"6 at index 1 is outside the 6 cache rows"),
        ([-2, 0], r"-2 at index 0 is outside"),
        ([4, 4], r"4 at index 1 is used twice"),
        ([0], r"shape \[1\] has 1 on axis 0, not 2 \(tokens in rows\)"),
    ],
)
def test_bad_slots_are_refused_and_nothing_is_written(slots, message):
    cache = np.zeros((3, 2, 4), np.float32)
    pattern = r"hybridge\.PagedWrite: input slot_mapping: " + message
    with pytest.raises(Exception, match=pattern):
        paged_write(cache, np.ones((2, 4), np.float32), slots)
    np.testing.assert_array_equal(cache, 0.0)


def test_rows_of_another_shape_are_refused():
    with pytest.raises(Exception, match=r"input rows: .*on axis 1, not 4 \(dimension of a cache"):
        paged_write(np.zeros((3, 2, 4), np.float32), np.ones((1, 5), np.float32), [0])
    with pytest.raises(Exception, match=r"StateWrite: input rows: shape \[1, 4\] has 2 dimensions"):
        state_write(np.zeros((3, 2, 4), np.float32), np.ones((1, 4), np.float32), [0])


def test_one_session_writes_step_after_step():
    cache = np.zeros((2, 2, 1), np.float32)
    inputs = {"cache": cache, "rows": np.ones((1, 1), np.float32), "slot_mapping": i32([0])}
    write = Operator("PagedWrite", inputs, {"cache_out": np.float32}, alias={"cache_out": "cache"})
    for step in range(4):
        write({**inputs, "rows": np.float32([[step + 1]]), "slot_mapping": i32([step])})
    np.testing.assert_array_equal(cache.ravel(), [1, 2, 3, 4])
