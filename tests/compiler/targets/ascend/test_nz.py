"""FRACTAL_NZ both ways, bit for bit, and the address of single elements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hybridge.artifacts.errors import CompileError
from hybridge.compiler.targets.ascend import nz

ml_dtypes = pytest.importorskip("ml_dtypes")
DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 32), (17, 33), (1, 64), (3, 5, 40), (128, 7168)])
def test_round_trip_keeps_every_bit(dtype, shape):
    width = np.dtype(dtype).itemsize
    raw = np.random.default_rng(0).integers(0, 256, (*shape, width), dtype=np.uint8)
    matrix = raw.view(dtype)[..., 0]
    back = nz.decode(nz.encode(matrix), shape)
    assert back.dtype == matrix.dtype
    assert back.tobytes() == np.ascontiguousarray(matrix).tobytes()


@given(st.tuples(st.integers(1, 40), st.integers(1, 70)).flatmap(lambda s: arrays(np.int8, s)))
def test_any_shape_round_trips(matrix):
    np.testing.assert_array_equal(nz.decode(nz.encode(matrix), matrix.shape), matrix)


def test_an_element_lies_where_the_layout_says():
    rows, columns = 50, 70
    matrix = np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns)
    blocks = nz.encode(matrix)
    assert blocks.shape == (5, 4, 16, 16)
    for row, column in [(0, 0), (17, 3), (49, 69), (16, 16)]:
        flat = ((column // 16 * 4 + row // 16) * 16 + row % 16) * 16 + column % 16
        assert blocks.reshape(-1)[flat] == matrix[row, column]


def test_padding_is_zero_and_counted():
    blocks = nz.encode(np.ones((17, 33), np.int8))
    assert blocks.sum() == 17 * 33
    assert blocks.nbytes == nz.padded_bytes((17, 33), 1) == 2 * 2 * 16 * 32


def test_experts_are_encoded_one_by_one():
    stack = np.random.default_rng(1).integers(-9, 9, (2, 17, 40)).astype(np.int8)
    np.testing.assert_array_equal(nz.encode(stack)[1], nz.encode(stack[1]))


def test_what_has_no_such_layout_is_refused():
    with pytest.raises(CompileError, match="not 4-byte ones"):
        nz.encode(np.zeros((16, 16), np.float32))
    with pytest.raises(CompileError, match="a layout of matrices"):
        nz.encode(np.zeros(16, np.int8))
    with pytest.raises(CompileError, match="are not those of a matrix"):
        nz.decode(np.zeros((1, 1, 16, 32), np.int8), (17, 32))


def test_packed_mxfp4_has_blocks_of_16_bytes():
    packed = np.arange(3 * 40 * 48, dtype=np.uint8).reshape(3, 40, 48)
    blocks = nz.encode(packed, block_bytes=16)
    assert blocks.shape == (3, 3, 3, 16, 16)
    np.testing.assert_array_equal(blocks[1, 2, 0, 5], packed[1, 5, 32:48])
    np.testing.assert_array_equal(nz.decode(blocks, packed.shape, block_bytes=16), packed)
