"""Writes the calls of a test run to a file, for replay.cpp to run again under a sanitizer."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

# A larger call adds nothing but time: the kernels' tiles and tasks are much smaller.
LARGEST = 8 << 20


def _text(value: str) -> bytes:
    return struct.pack("<q", len(value.encode())) + value.encode()


def _attribute(name: str, value: object) -> bytes:
    if isinstance(value, float):
        return _text(name) + _text("float") + struct.pack("<f", value)
    if isinstance(value, int):
        return _text(name) + _text("int") + struct.pack("<q", value)
    return _text(name) + _text("string") + _text(str(value))


def _tensor(array: np.ndarray | None, element: int) -> bytes:
    if array is None:
        return struct.pack("<q", 0)
    header = (1, element, array.ndim, *array.shape, array.nbytes)
    return struct.pack(f"<{len(header)}q", *header) + array.tobytes()


def entry(
    op: str,
    attributes: Mapping[str, object],
    inputs: Mapping[str, np.ndarray | None],
    outputs: Mapping[str, np.dtype],
    alias: Mapping[str, str],
    elements: Mapping[np.dtype, int],
) -> bytes:
    """One call as bytes, up to the last field: whether it failed (0, 1; 2: it may), as int64.

    Empty if it is too large.
    """
    arrays = [array for array in inputs.values() if array is not None]
    if sum(array.nbytes for array in arrays) > LARGEST:
        return b""
    parts = [_text(os.environ.get("HYBRIDGE_KERNEL_LEVEL", "")), _text(op)]
    parts.append(struct.pack("<q", len(attributes)))
    parts += [_attribute(name, value) for name, value in attributes.items()]
    parts.append(struct.pack("<q", len(inputs)))
    parts += [_tensor(a, elements[a.dtype] if a is not None else 0) for a in inputs.values()]
    parts.append(struct.pack("<q", len(outputs)))
    positions = list(inputs)
    for name, dtype in outputs.items():
        input_index = positions.index(alias[name]) if name in alias else -1
        parts.append(struct.pack("<qq", input_index, elements[dtype]))
    return b"".join(parts)


class Recording:
    """The file that the environment variable HYBRIDGE_RECORD names; nothing if it is unset."""

    def __init__(self) -> None:
        path = os.environ.get("HYBRIDGE_RECORD")
        self._file: BinaryIO | None = open(path, "ab") if path else None  # noqa: SIM115

    def __bool__(self) -> bool:
        return self._file is not None

    def add(self, call: bytes, *, failed: bool) -> None:
        if self._file is not None and call:
            self._file.write(call + struct.pack("<q", failed))
            self._file.flush()
