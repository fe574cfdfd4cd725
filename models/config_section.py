"""Typed, strict reading of one JSON object: a refusal names the file, the field and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hybridge.artifacts.errors import CheckpointError

LARGEST_SIZE: Final = 2**31 - 1
_REQUIRED: Final = object()
_KINDS: Final = {
    "NoneType": "null",
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "dict": "an object",
}


def kind_of(value: object) -> str:
    """The JSON name of a parsed value's type, for messages."""
    return _KINDS.get(type(value).__name__, type(value).__name__)


class Section:
    """One JSON object of a config, which remembers the fields that were asked for.

    Args:
        values: the parsed object.
        source: the file it came from, for messages.
        path: dotted place of the object in the file; empty for the top level.
    """

    def __init__(self, values: Mapping[str, object], source: str, path: str = "") -> None:
        self.values = values
        self.source = source
        self.path = path
        self.used: set[str] = set()

    def name(self, field: str) -> str:
        """The field's dotted name."""
        return f"{self.path}.{field}" if self.path else field

    def fail(self, field: str, problem: str, remedy: str) -> CheckpointError:
        """The error for one field; the caller raises it."""
        return CheckpointError(f"{self.source}: field '{self.name(field)}' {problem}", remedy)

    def has(self, *fields: str) -> bool:
        """Whether one of the fields is there and not null."""
        return any(self.values.get(field) is not None for field in fields)

    def unread(self) -> Iterator[str]:
        """Dotted names of the fields that nothing asked for."""
        return (self.name(field) for field in self.values if field not in self.used)

    def value(self, *fields: str, default: object = _REQUIRED) -> object:
        """The value under one of several names; two names that disagree are refused."""
        self.used.update(fields)
        present = [field for field in fields if field in self.values]
        if not present:
            if default is _REQUIRED:
                raise self.fail(
                    fields[0], "is missing", "add it, as the published config of this family has it"
                )
            return default
        first = self.values[present[0]]
        for other in present[1:]:
            if self.values[other] != first:
                raise self.fail(
                    other,
                    f"is {self.values[other]!r}, but its other name '{present[0]}' is {first!r}",
                    "keep one of the two",
                )
        return first

    def integer(self, *fields: str, minimum: int = 1, default: object = _REQUIRED) -> int:
        """A whole number of at least `minimum`, within 32 bits."""
        value = self.value(*fields, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_kind(fields[0], "an integer", value)
        if value < minimum:
            raise self.fail(
                fields[0], f"is {value}", f"it must be an integer of at least {minimum}"
            )
        if value > LARGEST_SIZE:
            raise self.fail(fields[0], "is above 2147483647", "no size or id is that large")
        return value

    def optional_integer(self, *fields: str, minimum: int = 1) -> int | None:
        """As `integer`; None where the field is null or absent."""
        if self.value(*fields, default=None) is None:
            return None
        return self.integer(*fields, minimum=minimum)

    def number(self, *fields: str, default: object = _REQUIRED) -> float:
        """A finite number, not necessarily positive."""
        value = self.value(*fields, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_kind(fields[0], "a number", value)
        # An integer may be too large for a float, and 1e999 is parsed as infinity.
        if (isinstance(value, int) and abs(value) > LARGEST_SIZE) or not math.isfinite(value):
            raise self.fail(fields[0], f"is {value!r:.40}", "it must be a number of usual size")
        return float(value)

    def positive(self, *fields: str, default: object = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self.number(*fields, default=default)
        if value <= 0:
            raise self.fail(fields[0], f"is {value}", "it must be greater than 0")
        return value

    def boolean(self, *fields: str, default: object = _REQUIRED) -> bool:
        """True or false; 0 and 1 are refused."""
        value = self.value(*fields, default=default)
        if not isinstance(value, bool):
            raise self._wrong_kind(fields[0], "true or false", value)
        return value

    def text(self, *fields: str, default: object = _REQUIRED) -> str:
        """A string."""
        value = self.value(*fields, default=default)
        if not isinstance(value, str):
            raise self._wrong_kind(fields[0], "a string", value)
        return value

    def choice(self, field: str, allowed: Sequence[str], default: object = _REQUIRED) -> str:
        """One of a few known strings."""
        value = self.text(field, default=default)
        if value not in allowed:
            raise self.fail(field, f"is '{value}'", f"supported values: {', '.join(allowed)}")
        return value

    def must_be(self, field: str, expected: object, why: str) -> None:
        """Refuse a field whose value, where given, is other than the one that is implemented."""
        value = self.value(field, default=expected)
        if value is None or (type(value) is type(expected) and value == expected):
            return
        raise self.fail(field, f"is {value!r}; only {expected!r} is supported", why)

    def sequence(self, *fields: str, default: object = _REQUIRED) -> list[object]:
        """A JSON list."""
        value = self.value(*fields, default=default)
        if not isinstance(value, list):
            raise self._wrong_kind(fields[0], "a list", value)
        return value

    def integers(self, *fields: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self.sequence(*fields)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise self._wrong_kind(fields[0], "a list of integers", value, "holds")
        return tuple(value for value in values if isinstance(value, int))

    def texts(self, *fields: str, default: object = _REQUIRED) -> tuple[str, ...]:
        """A list of strings."""
        values = self.sequence(*fields, default=default)
        for value in values:
            if not isinstance(value, str):
                raise self._wrong_kind(fields[0], "a list of strings", value, "holds")
        return tuple(str(value) for value in values)

    def section(self, *fields: str) -> Section:
        """A nested object."""
        value = self.value(*fields)
        present = next(field for field in fields if field in self.values)
        if not isinstance(value, dict):
            raise self._wrong_kind(present, "an object", value)
        return Section(value, self.source, self.name(present))

    def optional_section(self, *fields: str) -> Section | None:
        """A nested object; None where it is null or absent."""
        if self.value(*fields, default=None) is None:
            return None
        return self.section(*fields)

    def _wrong_kind(
        self, field: str, wanted: str, value: object, verb: str = "is"
    ) -> CheckpointError:
        return self.fail(field, f"{verb} {kind_of(value)} ({value!r:.60})", f"it must be {wanted}")


class SharedFields:
    """Fields that published configs put at the top level, in text_config, or in both."""

    def __init__(self, top: Section, text: Section) -> None:
        self.top = top
        self.text = text

    def home(self, *fields: str) -> Section:
        """The section that holds one of the fields; refuses two that differ."""
        for section in (self.top, self.text):
            section.used.update(fields)
        inner, outer = self.text.has(*fields), self.top.has(*fields)
        if inner and outer and self.top is not self.text:
            one, other = self.top.value(*fields), self.text.value(*fields)
            if one != other:
                raise self.text.fail(
                    fields[0],
                    f"is {other!r:.80}, but the top level says {one!r:.80}",
                    "make the two agree, or keep one",
                )
        return self.text if inner or not outer else self.top
