"""The compile cache: an artifact is found again by the hash of all that decides it.

The key is the sha256 of the canonical JSON of ``fields``: config, weights' identity, pipeline and
the source of each pass, options, shapes, tool versions, target. A miss names the fields that differ
from the nearest entry, so that it can be understood.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.canonical import canonical_json, digest, readable_json
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.folders import StagingFolder, already_exists, write_failure
from hybridge.artifacts.record import parse_json, read_limited

_FIELDS = "fields.json"
_ARTIFACT = "artifact"
_MAX_FIELDS_BYTES = 64 << 20
_ABSENT = "(absent)"
_SHOWN = 5  # differences in a message


@dataclass(frozen=True)
class Difference:
    """One field (dotted path) that differs: the value asked for, and that of the cached entry."""

    field: str
    wanted: Any
    cached: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.wanted!r}, cached with {self.cached!r}"


@dataclass(frozen=True)
class Miss:
    """Why an entry was not found.

    Attributes:
        key: the key that was asked for.
        nearest: key of the entry that differs in the fewest fields, or None if there is none.
        differences: those fields; empty when there is no entry, or when it is damaged.
        damaged: what is wrong with the entry of this very key, if it is there.
    """

    key: str
    nearest: str | None
    differences: tuple[Difference, ...]
    damaged: str = ""

    def __str__(self) -> str:
        if self.damaged:
            return f"the cached entry is damaged: {self.damaged}"
        if self.nearest is None:
            return "the cache is empty"
        shown = [str(difference) for difference in self.differences[:_SHOWN]]
        more = len(self.differences) - len(shown)
        return "; ".join([*shown, *([f"and {more} more"] if more else [])])


class CompileCache:
    """A folder of artifacts by key. Safe for concurrent processes: entries appear whole or not.

    Args:
        folder: made when first written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @staticmethod
    def key(fields: Mapping[str, Any]) -> str:
        """sha256 of the canonical JSON of ``fields``.

        Raises:
            ArtifactError: a value that JSON has not (a handle or a pointer has no place in a key).
        """
        return digest(_canonical(fields))

    def get(self, fields: Mapping[str, Any]) -> Path | None:
        """The cached artifact's folder, checked, or None (see `explain_miss`)."""
        entry = self.folder / self.key(fields)
        if not entry.is_dir() or self._damage(entry, fields):
            return None
        return entry / _ARTIFACT

    def copy_to(self, fields: Mapping[str, Any], output: str | Path, *, overwrite: bool) -> bool:
        """Put a copy of the cached artifact where a compiled one would be; False if there is none.

        Raises:
            ArtifactError: ``output`` exists and ``overwrite`` is False, or cannot be written.
        """
        found = self.get(fields)
        if found is None:
            return False
        if Path(output).exists() and not overwrite:
            raise already_exists(Path(output))
        staging = StagingFolder(Path(output))
        try:
            shutil.copytree(found, staging.path, symlinks=True, dirs_exist_ok=True)
            staging.publish(overwrite=overwrite)
        except BaseException as error:
            staging.discard()
            if failure := write_failure(Path(output), error):
                raise failure from error
            raise
        return True

    def put(self, fields: Mapping[str, Any], artifact: str | Path) -> Path:
        """Keep a copy of an artifact; one that is there already and sound is left alone.

        Returns:
            The cached artifact's folder.

        Raises:
            ArtifactError: the cache cannot be written.
        """
        found = self.get(fields)
        if found is not None:
            return found
        entry = self.folder / self.key(fields)
        staging = StagingFolder(entry)
        try:
            (staging.path / _FIELDS).write_bytes(readable_json(fields))
            shutil.copytree(artifact, staging.path / _ARTIFACT, symlinks=True)
            staging.publish(overwrite=True)
        except BaseException as error:
            staging.discard()
            if isinstance(error, ArtifactError) and self.get(fields) is not None:
                return entry / _ARTIFACT  # another process was faster
            if failure := write_failure(self.folder, error):
                raise failure from error
            raise
        return entry / _ARTIFACT

    def explain_miss(self, fields: Mapping[str, Any]) -> Miss:
        """Which fields differ from the nearest entry."""
        key = self.key(fields)
        entry = self.folder / key
        if entry.is_dir() and (damage := self._damage(entry, fields)):
            return Miss(key, None, (), damage)
        wanted = _flatten(parse_json(_canonical(fields), "cache key"))
        best: Miss | None = None
        for other in sorted(self.folder.glob(f"*/{_FIELDS}")):
            differences = _differences(wanted, _stored_fields(other))
            if best is None or len(differences) < len(best.differences):
                best = Miss(key, other.parent.name, differences)
        return best or Miss(key, None, ())

    def _damage(self, entry: Path, fields: Mapping[str, Any]) -> str:
        """What is wrong with an entry; empty when it is sound."""
        try:
            stored = parse_json(read_limited(entry / _FIELDS, _MAX_FIELDS_BYTES, _FIELDS), _FIELDS)
            if canonical_json(stored) != _canonical(fields):
                return f"{_FIELDS} is not what its key says"
            open_artifact(entry / _ARTIFACT, verify="full")
        except ArtifactError as error:
            return error.message
        return ""


def _canonical(fields: Mapping[str, Any]) -> bytes:
    try:
        return canonical_json(fields)
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"cache key: {error}", "use plain JSON values: text, numbers, lists, objects"
        ) from None


def _stored_fields(path: Path) -> dict[str, Any]:
    try:
        return _flatten(parse_json(read_limited(path, _MAX_FIELDS_BYTES, _FIELDS), _FIELDS))
    except ArtifactError:
        return {}


def _flatten(value: object, prefix: str = "") -> dict[str, Any]:
    """Nested objects and lists as dotted paths to plain values."""
    if isinstance(value, dict) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: value}
    result: dict[str, Any] = {}
    for key, item in items:
        result |= _flatten(item, f"{prefix}.{key}" if prefix else key)
    return result


def _differences(wanted: dict[str, Any], cached: dict[str, Any]) -> tuple[Difference, ...]:
    names = sorted(wanted.keys() | cached.keys())
    pairs = ((name, wanted.get(name, _ABSENT), cached.get(name, _ABSENT)) for name in names)
    # Compared as they are hashed: to Python 1, 1.0 and True are equal, to the key they are not.
    return tuple(
        Difference(*pair) for pair in pairs if canonical_json(pair[1]) != canonical_json(pair[2])
    )
