"""FRACTAL_NZ, the layout that Ascend's Cube unit reads without rearranging, in numpy.

A matrix [rows, columns] becomes [columns / C0, rows / 16, 16, C0]: blocks of 16 rows by 32 bytes,
the blocks of one column strip after each other, and rows and columns filled up with zeros. C0 is 32
bytes of elements: 16 for bf16, 32 for fp8 and int8; MXFP4 beside MXFP8 rows has 32 elements too, so
16 bytes (`block_bytes`) of its packed form. Leading (expert) dimensions stay in front. This
is what `torch_npu.npu_format_cast(weight, 29)` makes on a device; here bits move and are never
converted, so any 1- or 2-byte dtype works and a round trip is exact.

Source: Ascend C data layout documentation ("NZ" of `DataFormat`), and the constants of
`torch_npu.Format.FRACTAL_NZ` (29).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridge.artifacts.errors import CompileError

ACL_FORMAT_FRACTAL_NZ = 29
BLOCK_ROWS = 16
BLOCK_BYTES = 32


def block_columns(itemsize: int, block_bytes: int = BLOCK_BYTES) -> int:
    """C0: elements of `itemsize` bytes in a block's row.

    Raises:
        CompileError: no FRACTAL_NZ for elements of this size.
    """
    if itemsize not in (1, 2):
        raise CompileError(
            f"FRACTAL_NZ holds 1- and 2-byte elements, not {itemsize}-byte ones",
            remedy="keep the weight in ND, or cast it to bf16 first",
        )
    return block_bytes // itemsize


def padded_shape(
    shape: Sequence[int], itemsize: int, block_bytes: int = BLOCK_BYTES
) -> tuple[int, ...]:
    """The shape of the encoded array for a matrix (or a stack of them) of `shape`."""
    *stack, rows, columns = shape
    c0 = block_columns(itemsize, block_bytes)
    return (*stack, ceil(columns / c0), ceil(rows / BLOCK_ROWS), BLOCK_ROWS, c0)


def padded_bytes(shape: Sequence[int], itemsize: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many bytes the encoded array takes, padding included."""
    return prod(padded_shape(shape, itemsize, block_bytes)) * itemsize


def encode(matrix: NDArray[Any], block_bytes: int = BLOCK_BYTES) -> NDArray[Any]:
    """[..., rows, columns] -> [..., columns / C0, rows / 16, 16, C0], zero-filled, bits unchanged.

    Raises:
        CompileError: fewer than two dimensions, or elements of neither 1 nor 2 bytes.
    """
    if matrix.ndim < 2:
        raise CompileError(
            f"FRACTAL_NZ is a layout of matrices, not of shape {matrix.shape}",
            remedy="keep the weight in ND",
        )
    *stack, rows, columns = matrix.shape
    strips, row_blocks, _, c0 = padded_shape((rows, columns), matrix.itemsize, block_bytes)
    filled = np.zeros((*stack, row_blocks * BLOCK_ROWS, strips * c0), matrix.dtype)
    filled[..., :rows, :columns] = matrix
    blocks = filled.reshape(*stack, row_blocks, BLOCK_ROWS, strips, c0)
    return np.ascontiguousarray(np.moveaxis(blocks, -2, -4))


def decode(
    blocks: NDArray[Any], shape: Sequence[int], block_bytes: int = BLOCK_BYTES
) -> NDArray[Any]:
    """The inverse of `encode` for a matrix of `shape`.

    Raises:
        CompileError: the blocks are not those of a matrix of this shape.
    """
    expected = padded_shape(shape, blocks.itemsize, block_bytes)
    if blocks.shape != expected:
        raise CompileError(
            f"FRACTAL_NZ blocks of shape {blocks.shape} are not those of a matrix {tuple(shape)}, "
            f"which has {expected}",
            remedy="decode with the weight's own shape",
        )
    *stack, rows, columns = shape
    strips, row_blocks, _, c0 = expected[-4:]
    filled = np.moveaxis(blocks, -4, -2).reshape(*stack, row_blocks * BLOCK_ROWS, strips * c0)
    return np.ascontiguousarray(filled[..., :rows, :columns])
