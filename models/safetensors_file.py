"""The header of a safetensors file, checked before anything in it is believed.

Layout: 8 bytes header length (little endian), a JSON object, the tensors' bytes. The checks are
those of the format: no overlap, no hole, nothing outside the file, sizes that follow from shape and
dtype.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hybridge.artifacts.errors import CheckpointError

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIMENSIONS: Final = 16
# Bits, because the format knows types of less than a byte.
DTYPE_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_DAMAGED: Final = "the file is damaged or no safetensors file: fetch it again"


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """Where a tensor's bytes lie.

    Attributes:
        file: the safetensors file.
        offset: of the first byte, from the start of the file.
        length: in bytes.
        dtype: the format's name of the type, as "BF16".
        shape: dimensions.
    """

    file: Path
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, TensorRegion]:
    """The tensors of a safetensors file by name; only the header is read.

    Raises:
        CheckpointError: the file is truncated, damaged or not of this format.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(LENGTH_BYTES)
            length = _header_length(file, prefix, size)
            header = stream.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror or error})",
            "is the checkpoint complete? every shard that the index names must be there",
        ) from error
    if len(header) != length:
        raise CheckpointError(f"{file}: ends within its header", _DAMAGED)
    start = LENGTH_BYTES + length
    entries = _parse(file, header)
    entries.pop("__metadata__", None)
    regions = {
        name: _region(file, name, entry, start, size - start) for name, entry in entries.items()
    }
    _check_layout(file, regions, start, size)
    return regions


def _header_length(file: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{file}: has only {len(prefix)} bytes", _DAMAGED)
    length = int(struct.unpack("<Q", prefix)[0])
    if length > size - LENGTH_BYTES:
        raise CheckpointError(
            f"{file}: states a header of {length} bytes, but the file has {size}", _DAMAGED
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: states a header of {length} bytes; the format allows {MAX_HEADER_BYTES}",
            _DAMAGED,
        )
    return length


def _parse(file: Path, header: bytes) -> dict[str, object]:
    try:
        entries = json.loads(
            header.decode("utf-8"), object_pairs_hook=_unique_names, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: header is not valid JSON ({error})", _DAMAGED) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: header is not a JSON object", _DAMAGED)
    return entries


def _unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name is given twice")
    return values


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


def _region(file: Path, name: str, entry: object, start: int, data_size: int) -> TensorRegion:
    def bad(problem: str) -> CheckpointError:
        return CheckpointError(f"{file}: tensor '{name:.200}' {problem}", _DAMAGED)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("has no entry of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"has the unknown dtype {dtype!r:.40}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise bad("has a shape or data_offsets that are no lists of non-negative integers")
    begin, end = offsets
    if begin > end or end > data_size:
        raise bad(f"lies at [{begin}, {end}), outside the {data_size} bytes of data")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != (end - begin) * 8:
        raise bad(f"of shape {shape} and dtype {dtype} cannot have {end - begin} bytes")
    return TensorRegion(file, start + begin, end - begin, dtype, tuple(shape))


def _are_sizes(values: object) -> bool:
    """A short list of sizes; the limits keep a product of them from taking long."""
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def _check_layout(file: Path, regions: dict[str, TensorRegion], start: int, size: int) -> None:
    """The tensors cover the data once each: no overlap, no hole, nothing after them."""
    end = start
    for name, region in sorted(regions.items(), key=lambda item: (item[1].offset, item[1].length)):
        if region.offset != end:
            fault = "overlaps the one before" if region.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{file}: tensor '{name:.200}' {fault}", _DAMAGED)
        end += region.length
    if end != size:
        raise CheckpointError(f"{file}: {size - end} bytes belong to no tensor", _DAMAGED)
