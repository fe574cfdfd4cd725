"""Streaming weights into safetensors shards, chunk by chunk, with no tensor held in memory.

A safetensors header comes before the data it describes, so each shard keeps room for its header and
fills it in when it is closed; a shard is closed when the header or the data gets too large.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.dtypes import byte_length, element_type
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.safetensors import ALIGNMENT, encode_header
from hybridge.artifacts.weights import Origin, WeightEntry

HEADER_BYTES = 64 << 10
MAX_SHARD_BYTES = 4 << 30
_ENTRY_OVERHEAD = 160

Chunk = bytes | bytearray | memoryview | npt.NDArray[Any]


class WeightStream:
    """One weight being written; use as a context manager, call `write` until it is full."""

    def __init__(
        self, sink: BinaryIO, entry: WeightEntry, done: Callable[[WeightEntry], None]
    ) -> None:
        self._sink = sink
        self._entry = entry
        self._done = done
        self._hash = hashlib.sha256()
        self._written = 0

    def write(self, chunk: Chunk) -> None:
        """Append bytes, or an array's bytes in row-major order.

        Raises:
            ArtifactError: more bytes than dtype and shape hold.
        """
        data = _as_bytes(chunk)
        self._written += len(data)
        if self._written > self._entry.length:
            raise self._misfit()
        self._hash.update(data)
        self._sink.write(data)

    def _misfit(self) -> ArtifactError:
        entry = self._entry
        return ArtifactError(
            f"weight {entry.name!r}: {self._written} bytes written, but "
            f"{entry.dtype} {list(entry.shape)} holds {entry.length}",
            "write exactly the declared dtype and shape",
        )

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            return
        if self._written != self._entry.length:
            raise self._misfit()
        entry = self._entry
        self._done(replace(entry, sha256=self._hash.hexdigest()))


def _as_bytes(chunk: Chunk) -> memoryview:
    if isinstance(chunk, np.ndarray):
        flat = np.ascontiguousarray(chunk).reshape(-1)
        return flat.view(np.uint8).data
    return memoryview(chunk).cast("B")


class WeightShards:
    """Writes weights one after the other into ``folder/weights-00001.safetensors`` and so on.

    Args:
        root: the artifact being built.
        folder: relative folder for the shards.
        done: called with every finished weight.
    """

    def __init__(self, root: Path, folder: str, done: Callable[[WeightEntry], None]) -> None:
        self._root = root
        self._folder = folder
        self._finished = done
        self._sink: BinaryIO | None = None
        self._open_name = ""
        self._entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._position = 0
        self._header_estimate = 0
        self.files: list[str] = []

    def open(self, name: str, dtype: str, shape: tuple[int, ...], origin: Origin) -> WeightStream:
        """Start a weight. The one before must be finished.

        Raises:
            ArtifactError: another weight is still open.
        """
        if self._open_name:
            raise ArtifactError(
                f"weight {name!r} opened while {self._open_name!r} is unfinished",
                "write one weight at a time",
            )
        length = byte_length(dtype, shape)
        sink = self._shard_for(len(name.encode("utf-8")) + _ENTRY_OVERHEAD, length)
        entry = WeightEntry(
            name,
            element_type(dtype).name,
            shape,
            "artifact",
            self.files[-1],
            self._position,
            length,
            "",
            origin,
        )
        self._open_name = name
        return WeightStream(sink, entry, self._close_weight)

    def _shard_for(self, header: int, length: int) -> BinaryIO:
        full = (
            self._header_estimate + header > HEADER_BYTES
            or self._position + length > MAX_SHARD_BYTES
        )
        if self._sink is not None and full and self._entries:
            self.close()
        if self._sink is None:
            self._start_shard()
        self._header_estimate += header
        assert self._sink is not None
        return self._sink

    def _start_shard(self) -> None:
        name = f"{self._folder}/weights-{len(self.files) + 1:05d}.safetensors"
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files.append(name)
        self._sink = path.open("wb")
        self._sink.write(bytes(HEADER_BYTES))
        self._position = HEADER_BYTES
        self._header_estimate = 0
        self._entries = {}

    def _close_weight(self, entry: WeightEntry) -> None:
        self._entries[entry.name] = (entry.dtype, entry.shape)
        self._position += entry.length
        self._open_name = ""
        self._align()
        self._finished(entry)

    def _align(self) -> None:
        """Fill up to a multiple of 64 bytes, with a named filler: the format allows no holes."""
        gap = -self._position % ALIGNMENT
        if gap and self._sink is not None:
            filler = f"__padding_{len(self._entries)}"
            self._entries[filler] = ("uint8", (gap,))
            self._sink.write(bytes(gap))
            self._position += gap
            self._header_estimate += len(filler) + _ENTRY_OVERHEAD

    def close(self) -> None:
        """Write the open shard's header and close it.

        Raises:
            ArtifactError: a weight is unfinished.
        """
        if self._sink is None:
            return
        if self._open_name:
            raise ArtifactError(f"weight {self._open_name!r} was not finished", "write all of it")
        self._sink.seek(0)
        self._sink.write(encode_header(self._entries, total=HEADER_BYTES))
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()
