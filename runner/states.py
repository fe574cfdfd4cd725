"""The memory of caches and recurrent states: allocated once, aligned, shared by all sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.dtypes import byte_length, element_type
from hybridge.artifacts.errors import RunError
from hybridge.artifacts.manifest import StateSpec

ALIGNMENT = 64
_MAX_CACHE_ROWS = 2**31 - 1


def state_shape(spec: StateSpec, *, blocks: int, block_size: int, slots: int) -> tuple[int, ...]:
    """The shape of a state, with its symbols filled in."""
    sizes = {"blocks": blocks, "block_size": block_size, "slots": slots}
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def allocate_states(
    specs: Iterable[StateSpec], *, blocks: int, block_size: int, slots: int
) -> dict[str, npt.NDArray[Any]]:
    """Zeroed memory for every state, by name; the system backs a page when it is first written.

    Raises:
        RunError: more cache rows than an int32 can number, or more memory than there is.
    """
    if blocks * block_size > _MAX_CACHE_ROWS:
        raise RunError(
            f"{blocks} blocks of {block_size} are more rows than int32 numbers",
            "use fewer blocks or slots, or a shorter context",
        )
    arrays = {}
    for spec in specs:
        shape = state_shape(spec, blocks=blocks, block_size=block_size, slots=slots)
        try:
            arrays[spec.name] = _aligned_zeros(spec.dtype, shape)
        except MemoryError:
            raise RunError(
                f"no memory for {spec.name} {list(shape)} ({spec.dtype})",
                "load with fewer blocks or slots",
            ) from None
    return arrays


def _aligned_zeros(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    length = byte_length(dtype, shape)
    raw = np.zeros(length + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + length].view(element_type(dtype).storage).reshape(shape)
