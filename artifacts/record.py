"""Strict reading of JSON objects: every field is named, typed and accounted for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hybridge.artifacts.errors import ArtifactError

_REMEDY = "the file is damaged or was written by another version: compile the artifact again"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Record:
    """One JSON object being read; ``finish`` rejects the fields that nobody asked for.

    Args:
        value: what ``json.loads`` gave.
        where: the file and field, for messages.

    Raises:
        ArtifactError: from every method, when a field is missing or has another type.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ArtifactError(f"{where} must be an object, not {type(value).__name__}", _REMEDY)
        self._fields: dict[str, Any] = dict(value)
        self.where = where

    def fail(self, message: str) -> ArtifactError:
        """An error about this record."""
        return ArtifactError(f"{self.where}: {message}", _REMEDY)

    def _take(self, name: str) -> Any:
        if name not in self._fields:
            raise self.fail(f"field {name!r} is missing")
        return self._fields.pop(name)

    def text(self, name: str) -> str:
        """A string."""
        value = self._take(name)
        if not isinstance(value, str):
            raise self.fail(f"field {name!r} must be a string, not {value!r}")
        return value

    def optional_text(self, name: str) -> str | None:
        """A string or null."""
        value = self._take(name)
        if value is not None and not isinstance(value, str):
            raise self.fail(f"field {name!r} must be a string or null, not {value!r}")
        return value

    def sha256(self, name: str) -> str:
        """A sha256 in hexadecimal."""
        value = self.text(name)
        if not _SHA256.fullmatch(value):
            raise self.fail(f"field {name!r} is no sha256: {value!r}")
        return value

    def integer(self, name: str, low: int = 0) -> int:
        """An integer of at least ``low`` (booleans are none)."""
        return self._integer(name, self._take(name), low)

    def optional_integer(self, name: str, low: int = 0) -> int | None:
        """An integer or null."""
        value = self._take(name)
        return None if value is None else self._integer(name, value, low)

    def _integer(self, name: str, value: Any, low: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.fail(f"field {name!r} must be an integer of at least {low}, not {value!r}")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._take(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.fail(f"field {name!r} must be a number, not {value!r}")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._take(name)
        if not isinstance(value, list):
            raise self.fail(f"field {name!r} must be a list, not {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise self.fail(f"field {name!r} must hold strings only")
        return tuple(values)

    def integers(self, name: str, low: int = 0) -> tuple[int, ...]:
        """A list of integers of at least ``low``."""
        return tuple(self._integer(name, value, low) for value in self.items(name))

    def shape(self, name: str) -> tuple[int | str, ...]:
        """A shape: sizes, and names of symbolic ones."""
        dims = self.items(name)
        for dim in dims:
            if not isinstance(dim, str):
                self._integer(name, dim, 0)
        return tuple(dims)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object whose content the format does not define."""
        value = self._take(name)
        if not isinstance(value, dict):
            raise self.fail(f"field {name!r} must be an object, not {value!r}")
        return value

    def record(self, name: str) -> Record:
        """A nested object that is itself read strictly."""
        return Record(self._take(name), f"{self.where}.{name}")

    def records(self, name: str) -> list[Record]:
        """A list of nested objects."""
        values = self.items(name)
        return [Record(value, f"{self.where}.{name}[{i}]") for i, value in enumerate(values)]

    def named_records(self, name: str) -> dict[str, Record]:
        """An object of nested objects."""
        values = self.mapping(name)
        return {key: Record(value, f"{self.where}.{name}.{key}") for key, value in values.items()}

    def names(self) -> list[str]:
        """The fields not yet read."""
        return list(self._fields)

    def finish(self) -> None:
        """Reject unknown fields."""
        if self._fields:
            raise self.fail(f"unknown fields {sorted(self._fields)}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a field is given twice")
    return result


def parse_json(data: bytes, where: str) -> object:
    """Parse JSON; duplicate fields and NaN are errors.

    Raises:
        ArtifactError: not JSON.
    """

    def no_constant(text: str) -> object:
        raise ValueError(f"{text} is not a JSON number")

    try:
        return json.loads(data, object_pairs_hook=_unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where} is not valid JSON: {error}", _REMEDY) from None


def read_limited(path: Path, limit: int, where: str) -> bytes:
    """Read a whole small file, refusing one of more than ``limit`` bytes before reading it.

    Raises:
        ArtifactError: the file is missing or too large.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise ArtifactError(f"{where}: {size} bytes; at most {limit} are believed", _REMEDY)
        return path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{where}: cannot be read: {error.strerror}", _REMEDY) from None
