"""bf12 rows: bfloat16 weights in 12 bits each, without loss (the format of kernels/math/packed.h).

A weight's exponent is one of few: those of a row lie, but for some, within 15 of each other. A packed row holds,
for K weights (a multiple of 128):

    K / 128 blocks   64 bytes: the high nibble of byte j belongs to column j of the block, the low one to 64 + j;
                     128 bytes: one a column. A column's byte and nibble are 12 bits: sign, code (4), mantissa (7).
    64 bytes         base; number of exceptions, at most 15; two zeros; then the exceptions, each a column and a
                     bfloat16 (uint16, little endian). The rest is zero.

Code 0 is a zero of that sign, code c an exponent field of base + c. What does not fit, infinities, NaNs and
subnormal numbers among it, is stored as 0 and listed as an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 128
_BLOCK_BYTES = 192
_TRAILER_BYTES = 64
MOST_EXCEPTIONS = 15
MOST_COLUMNS = 1 << 16
_CODES = 15
# Rows are worked on in pieces of so many weights, so that memory holds little beside the result.
_PIECE = 1 << 20

Words = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


def row_bytes(columns: int) -> int:
    """Bytes of a packed row of `columns` weights, a multiple of 64.

    Raises:
        ValueError: no packed row has so many columns.
    """
    if columns < 1 or columns % BLOCK or columns > MOST_COLUMNS:
        raise ValueError(f"{columns} columns are no multiple of {BLOCK} up to {MOST_COLUMNS}")
    return columns // BLOCK * _BLOCK_BYTES + _TRAILER_BYTES


def columns_of(packed_bytes: int) -> int:
    """How many weights a packed row of so many bytes holds.

    Raises:
        ValueError: no packed row has this length.
    """
    blocks, rest = divmod(packed_bytes - _TRAILER_BYTES, _BLOCK_BYTES)
    if blocks < 1 or rest:
        raise ValueError(f"{packed_bytes} bytes are no packed row")
    return blocks * BLOCK


def most_exceptions(words: Words) -> int:
    """The largest number of exceptions that a row of `words` [..., K] needs; above MOST_EXCEPTIONS: not packable."""
    return max((int(_windows(piece)[1].max()) for _, piece in _pieces(words)), default=0)


def pack_rows(words: Words) -> Bytes:
    """The bfloat16 bits `words` [..., K] as packed rows [..., row_bytes(K)].

    Raises:
        ValueError: K does not fit, or a row has too many exceptions.
    """
    length = row_bytes(words.shape[-1])
    packed = np.zeros((words.size // words.shape[-1], length), np.uint8)
    for first, piece in _pieces(words):
        _pack_piece(piece, packed[first : first + len(piece)])
    return packed.reshape(*words.shape[:-1], length)


def unpack_rows(packed: Bytes) -> Words:
    """The bfloat16 bits [..., K] of packed rows [..., row_bytes(K)].

    An exception whose column is outside the row is passed over, as in the kernels.

    Raises:
        ValueError: the last dimension is the length of no packed row.
    """
    columns = columns_of(packed.shape[-1])
    rows = packed.reshape(-1, packed.shape[-1])
    words = np.empty((len(rows), columns), np.uint16)
    for first, piece in _pieces(rows):
        words[first : first + len(piece)] = _unpack_piece(piece, columns)
    return words.reshape(*packed.shape[:-1], columns)


def _pieces(array: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(first row, rows) of an array seen as [rows, last dimension]."""
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, _PIECE // array.shape[-1])
    for first in range(0, len(rows), step):
        yield first, rows[first : first + step]


def _windows(words: Words) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of each row, the base whose 15 exponents cover the most weights, and how many others are not zero."""
    exponents = (words >> 7) & 255
    slots = np.arange(len(words), dtype=np.int64)[:, None] * 256 + exponents
    counts = np.bincount(slots.reshape(-1), minlength=256 * len(words)).reshape(-1, 256)
    zeros = np.count_nonzero((words & 0x7FFF) == 0, axis=1)
    below = np.cumsum(counts, axis=1)
    covered = below[:, _CODES:255] - below[:, : 255 - _CODES]
    base = covered.argmax(axis=1)
    return base, words.shape[1] - zeros - covered[np.arange(len(words)), base]


def _pack_piece(words: Words, packed: Bytes) -> None:
    base, exceptions = _windows(words)
    if exceptions.size and exceptions.max() > MOST_EXCEPTIONS:
        raise ValueError(
            f"a row has {exceptions.max()} weights outside 15 consecutive exponents, more than {MOST_EXCEPTIONS}"
        )
    code = ((words >> 7) & 255).astype(np.int16) - base[:, None].astype(np.int16)
    zero = (words & 0x7FFF) == 0
    listed = ((code < 1) | (code > _CODES)) & ~zero
    code[listed | zero] = 0
    twelve = (code << 7).astype(np.uint16) | (words & 127) | ((words >> 15) << 11)
    twelve[listed] = 0
    columns = words.shape[1]
    blocks = packed[:, :-_TRAILER_BYTES].reshape(len(words), columns // BLOCK, _BLOCK_BYTES)
    split = twelve.reshape(len(words), -1, BLOCK)
    nibbles = (split & 15).astype(np.uint8)
    blocks[:, :, :64] = nibbles[:, :, :64] << 4 | nibbles[:, :, 64:]
    blocks[:, :, 64:] = split >> 4
    _write_trailers(words, base, listed, packed[:, -_TRAILER_BYTES:])


def _write_trailers(
    words: Words, base: npt.NDArray[np.int64], listed: npt.NDArray[np.bool_], trailer: Bytes
) -> None:
    counts = np.count_nonzero(listed, axis=1)
    trailer[:, 0], trailer[:, 1] = base, counts
    row, column = np.nonzero(listed)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    entries = np.zeros((len(words), MOST_EXCEPTIONS, 2), "<u2")
    entries[row, place, 0] = column
    entries[row, place, 1] = words[row, column]
    trailer[:, 4:] = entries.reshape(len(words), -1).view(np.uint8)


def _unpack_piece(packed: Bytes, columns: int) -> Words:
    trailer = packed[:, -_TRAILER_BYTES:]
    blocks = packed[:, :-_TRAILER_BYTES].reshape(len(packed), columns // BLOCK, _BLOCK_BYTES)
    nibbles = np.concatenate([blocks[:, :, :64] >> 4, blocks[:, :, :64] & 15], axis=2)
    twelve = blocks[:, :, 64:].astype(np.uint16) << 4 | nibbles
    twelve = twelve.reshape(len(packed), columns)
    code = twelve >> 7 & 15
    exponent = np.where(code == 0, 0, (code + trailer[:, :1]) & 255).astype(np.uint16)
    words: Words = (twelve >> 11 << 15) | exponent << 7 | (twelve & 127)
    entries = np.ascontiguousarray(trailer[:, 4:]).view("<u2").reshape(len(packed), -1, 2)
    count = np.minimum(trailer[:, 1:2], MOST_EXCEPTIONS)
    used = (np.arange(MOST_EXCEPTIONS) < count) & (entries[:, :, 0] < columns)
    row, place = np.nonzero(used)
    words[row, entries[row, place, 0]] = entries[row, place, 1]
    return words
