"""weights.json: where every weight of the graphs lies, what it was made from, and its hash.

A weight is a dense region of a file: inside the artifact (``weights/*.safetensors``), in the
checkpoint's own safetensors (policy ``reference``), or nowhere (policy ``none``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.canonical import digest_file, readable_json
from hybridge.artifacts.dtypes import byte_length, element_type
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.manifest import REFERENCE
from hybridge.artifacts.paths import check_relative, resolve_inside
from hybridge.artifacts.record import Record, parse_json, read_limited
from hybridge.artifacts.safetensors import map_file

WEIGHTS = "weights.json"
MAX_WEIGHTS_BYTES = 512 << 20

Place = Literal["artifact", "checkpoint", "absent"]
_PLACES: tuple[Place, ...] = ("artifact", "checkpoint", "absent")
_AGAIN = "compile the artifact again"


@dataclass(frozen=True)
class Origin:
    """Which checkpoint tensors a weight was made from, and how ("" = used as it is)."""

    tensors: tuple[str, ...]
    transform: str = ""


@dataclass(frozen=True)
class WeightEntry:
    """One weight.

    Attributes:
        name: the graphs' initializer name.
        dtype: element type.
        shape: its sizes.
        place: "artifact", "checkpoint" (see `read_reference`) or "absent".
        file: path relative to that place; "" when absent.
        offset: first byte in the file.
        length: bytes; always those of dtype and shape.
        sha256: of the region; "" when absent.
        origin: the checkpoint tensors it comes from.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: Place
    file: str
    offset: int
    length: int
    sha256: str
    origin: Origin


def weights_to_bytes(entries: Iterable[WeightEntry]) -> bytes:
    """The bytes of weights.json, sorted by name."""
    ordered = sorted(entries, key=lambda entry: entry.name)
    return readable_json({"weights": [asdict(entry) for entry in ordered]})


def parse_weights(data: bytes) -> dict[str, WeightEntry]:
    """Parse and check weights.json.

    Raises:
        ArtifactError: ill-formed, a name twice, a length that does not fit dtype and shape, or a
            path that leaves its folder.
    """
    record = Record(parse_json(data, WEIGHTS), WEIGHTS)
    entries: dict[str, WeightEntry] = {}
    for item in record.records("weights"):
        entry = _parse_entry(item)
        if entry.name in entries:
            raise ArtifactError(f"{WEIGHTS}: weight {entry.name!r} is listed twice", _AGAIN)
        entries[entry.name] = entry
    record.finish()
    return entries


def _parse_entry(record: Record) -> WeightEntry:
    origin = record.record("origin")
    place = record.text("place")
    if place not in _PLACES:
        raise record.fail(f"place {place!r} is none of {', '.join(_PLACES)}")
    absent = place == "absent"
    entry = WeightEntry(
        name=record.text("name"),
        dtype=record.text("dtype"),
        shape=record.integers("shape"),
        place=place,
        file=record.text("file"),
        offset=record.integer("offset"),
        length=record.integer("length"),
        sha256=record.text("sha256") if absent else record.sha256("sha256"),
        origin=Origin(origin.texts("tensors"), origin.text("transform")),
    )
    origin.finish()
    record.finish()
    if entry.length != byte_length(entry.dtype, entry.shape):
        raise record.fail(
            f"weight {entry.name!r}: {entry.length} bytes do not hold "
            f"{entry.dtype} {list(entry.shape)}"
        )
    if not absent:
        check_relative(entry.file, f"{WEIGHTS}: weight {entry.name!r}")
    return entry


def read_weights(path: Path) -> dict[str, WeightEntry]:
    """Read weights.json of an artifact."""
    return parse_weights(read_limited(path, MAX_WEIGHTS_BYTES, WEIGHTS))


def reference_to_bytes(checkpoint: Path) -> bytes:
    """The bytes of weights/reference.json: where the checkpoint lay when it was compiled."""
    return readable_json({"checkpoint": str(checkpoint)})


def read_reference(root: Path) -> Path | None:
    """The checkpoint folder that weights/reference.json names, or None if the file is not there.

    Raises:
        ArtifactError: the file is damaged.
    """
    if not (root / REFERENCE).exists():
        return None
    data = read_limited(resolve_inside(root, REFERENCE, REFERENCE), 1 << 20, REFERENCE)
    record = Record(parse_json(data, REFERENCE), REFERENCE)
    folder = record.text("checkpoint")
    record.finish()
    return Path(folder)


class WeightFiles:
    """Finds, checks and maps the files that weights lie in; every file is mapped once.

    Args:
        root: the artifact.
        checkpoint: folder for the entries whose place is "checkpoint".
    """

    def __init__(self, root: Path, checkpoint: Path | None) -> None:
        self._root = root
        self._checkpoint = checkpoint
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}

    def path(self, entry: WeightEntry) -> Path:
        """The file of a weight, checked to exist and to hold its region.

        Raises:
            ArtifactError: absent by policy, missing, or too short.
        """
        path = self._locate(entry)
        size = path.stat().st_size
        if entry.offset + entry.length > size:
            raise ArtifactError(
                f"weight {entry.name!r}: bytes {entry.offset} to {entry.offset + entry.length} "
                f"of {path}, which has only {size}",
                "the file is truncated or another one: restore it, or compile again",
            )
        return path

    def _locate(self, entry: WeightEntry) -> Path:
        if entry.place == "absent":
            raise ArtifactError(
                f"weight {entry.name!r} is not there: the artifact was compiled with "
                "--weights none, so it can be inspected but not run",
                "compile again with --weights copy or --weights reference",
            )
        if entry.place == "artifact":
            return resolve_inside(self._root, entry.file, f"weight {entry.name!r}")
        return self._locate_referenced(entry)

    def _locate_referenced(self, entry: WeightEntry) -> Path:
        remedy = (
            "give the checkpoint's folder as weights_dir (--weights-dir), "
            "or compile again with --weights copy"
        )
        if self._checkpoint is None:
            raise ArtifactError(
                f"weight {entry.name!r} lies in a checkpoint that is not named", remedy
            )
        # Links are followed here: model hubs keep checkpoints as folders of links, and this
        # folder is the user's, not the artifact's; the region's hash says if it is the right one.
        path = self._checkpoint / entry.file
        if not path.is_file():
            raise ArtifactError(f"weight {entry.name!r}: {path} is not there", remedy)
        return path

    def array(self, entry: WeightEntry) -> npt.NDArray[Any]:
        """The weight as a read-only view of the mapped file: nothing is read or copied.

        bf16 and float8 come as their unsigned storage type.
        """
        path = self.path(entry)
        if path not in self._maps:
            self._maps[path] = map_file(path)
        if math.prod(entry.shape) == 0:
            return np.zeros(entry.shape, element_type(entry.dtype).storage)
        flat = self._maps[path][entry.offset : entry.offset + entry.length]
        return flat.view(element_type(entry.dtype).storage).reshape(entry.shape)

    def check_hash(self, entry: WeightEntry) -> None:
        """Read the weight's bytes and compare their sha256.

        Raises:
            ArtifactError: they differ.
        """
        path = self.path(entry)
        found = digest_file(path, entry.offset, entry.length)
        if found != entry.sha256:
            raise ArtifactError(
                f"weight {entry.name!r}: the bytes in {path} have sha256 {found[:16]}..., "
                f"expected {entry.sha256[:16]}...",
                "the file changed since it was compiled: restore it, or compile again",
            )
