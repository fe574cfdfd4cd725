"""Canonical JSON and digests: the same value always gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 1 << 20


def canonical_json(value: object) -> bytes:
    """The compact canonical form that is hashed: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def readable_json(value: object) -> bytes:
    """The form that is stored: as deterministic as the canonical one, but a person can read it."""
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8") + b"\n"


def digest(data: bytes | memoryview) -> str:
    """sha256 of ``data``, in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_json(value: object) -> str:
    """sha256 of the canonical JSON of ``value``."""
    return digest(canonical_json(value))


def digest_file(
    path: Path,
    offset: int = 0,
    length: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> str:
    """sha256 of a file, or of ``length`` bytes of it from ``offset``, read in small chunks.

    A file that ends early hashes what there is; callers compare sizes first.
    """
    state = hashlib.sha256()
    remaining = path.stat().st_size - offset if length is None else length
    with path.open("rb") as stream:
        stream.seek(offset)
        while remaining > 0 and (chunk := stream.read(min(CHUNK_BYTES, remaining))):
            state.update(chunk)
            remaining -= len(chunk)
            if progress is not None:
                progress(len(chunk))
    return state.hexdigest()
