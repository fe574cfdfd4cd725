"""The element types that weights, caches and graph inputs can have, under one name each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from hybridge.artifacts.errors import ArtifactError


@dataclass(frozen=True)
class ElementType:
    """One element type.

    Attributes:
        name: as written in manifests (the spelling of torch and numpy).
        safetensors: its code in safetensors headers.
        onnx: its number in ``onnx.TensorProto.DataType``.
        storage: numpy type that holds its bytes (numpy has no bf16 nor float8).
    """

    name: str
    safetensors: str
    onnx: int
    storage: np.dtype[np.generic]

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return self.storage.itemsize


def _element(name: str, safetensors: str, onnx: int, storage: DTypeLike) -> ElementType:
    return ElementType(name, safetensors, onnx, np.dtype(storage))


ELEMENT_TYPES: dict[str, ElementType] = {
    entry.name: entry
    for entry in (
        _element("float32", "F32", 1, np.float32),
        _element("uint8", "U8", 2, np.uint8),
        _element("int8", "I8", 3, np.int8),
        _element("uint16", "U16", 4, np.uint16),
        _element("int16", "I16", 5, np.int16),
        _element("int32", "I32", 6, np.int32),
        _element("int64", "I64", 7, np.int64),
        _element("bool", "BOOL", 9, np.bool_),
        _element("float16", "F16", 10, np.float16),
        _element("float64", "F64", 11, np.float64),
        _element("bfloat16", "BF16", 16, np.uint16),
        _element("float8_e4m3fn", "F8_E4M3", 17, np.uint8),
        _element("float8_e5m2", "F8_E5M2", 19, np.uint8),
        _element("float8_e8m0fnu", "F8_E8M0", 24, np.uint8),
    )
}
_BY_SAFETENSORS = {entry.safetensors: entry for entry in ELEMENT_TYPES.values()}
_BY_ONNX = {entry.onnx: entry for entry in ELEMENT_TYPES.values()}


def element_type(name: str) -> ElementType:
    """The element type called ``name``; a leading ``torch.`` is ignored.

    Raises:
        ArtifactError: no such type.
    """
    found = ELEMENT_TYPES.get(name.removeprefix("torch."))
    if found is None:
        raise ArtifactError(
            f"unknown element type {name!r}", f"use one of {', '.join(sorted(ELEMENT_TYPES))}"
        )
    return found


def from_safetensors(code: str) -> ElementType | None:
    """The element type of a safetensors dtype code, or None if it is not one that is used here."""
    return _BY_SAFETENSORS.get(code)


def from_onnx(number: int) -> ElementType | None:
    """The element type of an ONNX ``TensorProto.DataType`` number, or None if not used here."""
    return _BY_ONNX.get(number)


def byte_length(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * element_type(dtype).size
