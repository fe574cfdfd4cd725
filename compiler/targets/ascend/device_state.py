"""How caches and states lie on the device, and the way there and back from the graph signature.

The operators dictate the layout, so the device's inputs differ from DESIGN.md's signature:

* Paged caches get block 0 and states get row 0 as a null row: what must not be written (slot -1,
  padding, an inactive row) goes there. Block b of the signature is block b + 1, slot s row s + 1.
  npu_scatter_pa_kv_cache and npu_scatter_nd_update_ have no "skip", and the recurrent operator
  reads and writes a row for every token.
* A latent cache is two: the latent part and the rope part, since npu_sparse_flash_attention takes
  them apart and a slice of one would copy the cache.
* A KDA state is [slots, H, V, K], value first; a convolution state is [slots, W - 1, 3P].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceCache:
    """One device tensor that holds (a part of) one cache of the graph signature.

    Attributes:
        name: of the device input.
        cache: of the signature's cache that it holds.
        kind: "paged", "kda_state" or "conv_state".
        shape: on the device, the null row included.
        dtype: torch's name of its dtype.
        columns: of a paged cache, the columns [first, last) that it holds.
    """

    name: str
    cache: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    columns: tuple[int, int] = (0, 0)


def to_device(cache: DeviceCache, value: Tensor) -> Tensor:
    """The device tensor for a cache of the signature, its null row zero."""
    first, last = cache.columns
    value = value[..., first:last] if cache.kind == "paged" else value.transpose(-1, -2)
    null = torch.zeros_like(value[:1])
    return torch.cat([null, value]).to(getattr(torch, cache.dtype)).contiguous()


def from_device(caches: tuple[DeviceCache, ...], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The signature's caches from device tensors; the inverse of `to_device`."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for cache in caches:
        value = values[cache.name][1:]
        value = value if cache.kind == "paged" else value.transpose(-1, -2)
        parts.setdefault(cache.cache, []).append((cache.columns[0], value))
    return {
        name: torch.cat([value for _, value in sorted(pieces, key=lambda piece: piece[0])], -1)
        for name, pieces in parts.items()
    }
