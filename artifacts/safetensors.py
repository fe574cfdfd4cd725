"""Reading and writing of safetensors files, with nothing believed before it is checked.

Format: 8 bytes little-endian header length N; N bytes of JSON, ``{name: {dtype, shape,
data_offsets: [begin, end]}}`` and an optional ``__metadata__`` of strings; then the data, that the
tensors cover without hole or overlap. https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.dtypes import ELEMENT_TYPES, element_type, from_safetensors
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.record import Record, parse_json

MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 64
_REMEDY = "the file is damaged or incomplete: fetch or write it again"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        dtype: element type name, as in `hybridge.artifacts.dtypes`.
        shape: its sizes.
        offset: first byte, counted from the start of the file.
        length: bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Header:
    """A checked header: every tensor lies inside the file, and they do not overlap."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(path: str | Path) -> Header:
    """Read and check the header of a safetensors file; no data is read.

    Raises:
        ArtifactError: truncated, too large a header, unknown type, sizes that do not agree.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            header_bytes = _read_header_bytes(stream, size, path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}", _REMEDY) from None
    return _parse_header(header_bytes, size, path)


def _read_header_bytes(stream: BinaryIO, size: int, path: Path) -> bytes:
    length = int.from_bytes(stream.read(8), "little") if size >= 8 else -1
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ArtifactError(
            f"{path}: claims a header of {length} bytes in a file of {size} bytes", _REMEDY
        )
    return stream.read(length)


def _parse_header(data: bytes, size: int, path: Path) -> Header:
    parsed = parse_json(data, f"{path} (header)")
    if not isinstance(parsed, dict):
        raise ArtifactError(f"{path}: the header is no JSON object", _REMEDY)
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ArtifactError(f"{path}: __metadata__ must map strings to strings", _REMEDY)
    start = 8 + len(data)
    tensors = {name: _parse_entry(name, raw, start, path) for name, raw in parsed.items()}
    _check_cover(tensors, start, size, path)
    return Header(tensors, metadata)


def _parse_entry(name: str, raw: object, start: int, path: Path) -> TensorEntry:
    record = Record(raw, f"{path}: tensor {name!r}")
    code = record.text("dtype")
    shape = record.integers("shape")
    offsets = record.integers("data_offsets")
    record.finish()
    element = from_safetensors(code)
    if element is None:
        raise ArtifactError(f"{path}: tensor {name!r} has the unknown dtype {code!r}", _REMEDY)
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * element.size:
        raise ArtifactError(
            f"{path}: tensor {name!r}: offsets {list(offsets)} do not fit {code} {list(shape)}",
            _REMEDY,
        )
    return TensorEntry(element.name, shape, start + offsets[0], offsets[1] - offsets[0])


def _check_cover(tensors: Mapping[str, TensorEntry], start: int, size: int, path: Path) -> None:
    position = start
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].length)):
        if entry.offset != position:
            raise ArtifactError(f"{path}: hole or overlap before tensor {name!r}", _REMEDY)
        position += entry.length
    if position != size:
        raise ArtifactError(
            f"{path}: the tensors end at byte {position}, the file at {size}", _REMEDY
        )


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped read-only; an empty file gives an empty array."""
    if path.stat().st_size == 0:
        return np.zeros(0, np.uint8)
    # A plain ndarray over the map: np.memmap's subclass hooks cost at every view.
    return np.asarray(np.memmap(path, np.uint8, "r"))


def view(data: npt.NDArray[np.uint8], entry: TensorEntry) -> Array:
    """A tensor as a view into the file's bytes; bf16 and float8 as their unsigned storage."""
    flat = data[entry.offset : entry.offset + entry.length]
    return flat.view(element_type(entry.dtype).storage).reshape(entry.shape)


def read_tensors(path: str | Path, names: Iterable[str] | None = None) -> dict[str, Array]:
    """Tensors of a file as read-only mapped arrays; all of them, or those in ``names``.

    Raises:
        ArtifactError: the file is damaged, or a name is not in it.
    """
    path = Path(path)
    header = read_header(path)
    wanted = list(header.tensors if names is None else names)
    for name in wanted:
        if name not in header.tensors:
            raise ArtifactError(f"{path}: has no tensor {name!r}", _REMEDY)
    data = map_file(path)
    return {name: view(data, header.tensors[name]) for name in wanted}


def encode_header(
    entries: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    total: int | None = None,
) -> bytes:
    """The bytes before the data, for tensors laid out in the order of ``entries``.

    Args:
        entries: name to (dtype, shape).
        metadata: free strings.
        total: pad to exactly this many bytes; default, to a multiple of 64 so that data is aligned.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in entries.items():
        element = element_type(dtype)
        end = position + math.prod(shape) * element.size
        header[name] = {
            "dtype": element.safetensors,
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8 if total is None else total - 8
    if length < len(text):
        raise ArtifactError(f"a header of {len(text)} bytes does not fit the {length} kept for it")
    return length.to_bytes(8, "little") + text.ljust(length)


def encode(
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> bytes:
    """A whole small safetensors file. ``dtypes`` names types that numpy has not (bfloat16)."""
    named = dtypes or {}
    entries = {
        name: (named.get(name, array.dtype.name), array.shape) for name, array in tensors.items()
    }
    for name, array in tensors.items():
        if ELEMENT_TYPES[entries[name][0]].storage != array.dtype:
            raise ArtifactError(f"tensor {name!r}: {array.dtype} does not hold {entries[name][0]}")
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    return encode_header(entries, metadata) + data


def write(
    path: str | Path,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Write a small safetensors file (see `encode`)."""
    Path(path).write_bytes(encode(tensors, metadata, dtypes))
