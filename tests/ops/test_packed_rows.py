"""bf12 rows: every bit comes back, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridge.ops.packed_rows import (
    MOST_EXCEPTIONS,
    columns_of,
    most_exceptions,
    pack_rows,
    row_bytes,
    unpack_rows,
)

ZEROS = (0x0000, 0x8000)
# Subnormal numbers, the largest one, infinities and NaNs: outside every window.
ODD = (0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF)


@st.composite
def rows_of_words(draw) -> np.ndarray:
    """[R, K] bfloat16 bits: exponents within some window, some zeros, some weights anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, columns = draw(st.integers(0, 5)), 128 * draw(st.integers(1, 5))
    width = draw(st.integers(1, 15))
    lowest = rng.integers(1, 256 - width, (rows, 1))
    exponents = lowest + rng.integers(0, width, (rows, columns))
    words = exponents << 7 | rng.integers(0, 128, exponents.shape)
    words |= rng.integers(0, 2, words.shape) << 15
    zeros = rng.random(words.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    words[zeros] = rng.choice(ZEROS, words.shape)[zeros]
    for row in words:
        places = rng.choice(columns, draw(st.integers(0, MOST_EXCEPTIONS)), replace=False)
        anything = rng.integers(0, 1 << 16, len(places))
        row[places] = np.where(rng.random(len(places)) < 0.3, rng.choice(ODD), anything)
    return words.astype(np.uint16)


@given(rows_of_words())
def test_every_bit_comes_back(words):
    assert most_exceptions(words) <= MOST_EXCEPTIONS
    packed = pack_rows(words)
    assert packed.shape == (len(words), row_bytes(words.shape[1]))
    np.testing.assert_array_equal(unpack_rows(packed), words)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 0.02, 1e30])
def test_leading_dimensions_stay(scale):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((2, 3, 2048)) * scale).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    packed = pack_rows(words)
    assert packed.shape == (2, 3, 3136)
    np.testing.assert_array_equal(unpack_rows(packed), words)


def test_heavy_tails_are_exceptions_on_both_sides():
    """Outliers do not widen a window that the other weights fill."""
    rng = np.random.default_rng(1)
    values = np.exp2(rng.uniform(-7, 7, (4, 256))).astype(np.float32)
    values[:, :5], values[:, 5:11] = 3e38, -1e-38
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert most_exceptions(words) == 11
    np.testing.assert_array_equal(unpack_rows(pack_rows(words)), words)


def test_one_exception_too_many_is_refused():
    words = np.full((3, 128), 0x3F80, np.uint16)
    words[1, : MOST_EXCEPTIONS + 1] = 0x7F80
    assert most_exceptions(words) == MOST_EXCEPTIONS + 1
    with pytest.raises(ValueError, match="16 weights outside 15 consecutive exponents"):
        pack_rows(words)


@pytest.mark.parametrize("columns", [0, 64, 130, (1 << 16) + 128])
def test_columns_that_do_not_fit_are_refused(columns):
    with pytest.raises(ValueError, match=f"{columns} columns"):
        row_bytes(columns)


@pytest.mark.parametrize("length", [0, 64, 255, 257])
def test_lengths_of_no_row_are_refused(length):
    with pytest.raises(ValueError, match=f"{length} bytes"):
        columns_of(length)
    assert columns_of(row_bytes(384)) == 384


def test_damaged_exceptions_stay_in_their_row():
    packed = pack_rows(np.full((2, 128), 0x3F80, np.uint16))
    packed[0, -64:] = 255
    packed[0, -64] = 100
    words = unpack_rows(packed)
    assert words.shape == (2, 128)
    np.testing.assert_array_equal(words[1], 0x3F80)


def test_more_rows_than_a_piece():
    words = np.full((1100, 1024), 0x3F80, np.uint16)
    words[::7, 3] = 0xBF81
    np.testing.assert_array_equal(unpack_rows(pack_rows(words)), words)
