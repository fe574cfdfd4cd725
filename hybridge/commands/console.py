"""What the verbs share in speaking to a terminal: common options, progress, tables, JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

# A JSON list of numbers laid over several lines; no string can look so, for its line breaks are escaped.
NUMBERS = re.compile(r"\[\s+-?\d[-+\d.eE,\s]*\]")

Function = TypeVar("Function", bound=Callable[..., Any])


def json_option(function: Function) -> Function:
    """`--json`: one JSON document on stdout instead of text."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(
        function
    )


def debug_option(function: Function) -> Function:
    """`--debug` behind the verb too; `hybridge.cli.main` looks for it among the arguments."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
    )(function)


def quiet_option(function: Function) -> Function:
    """`--quiet`: no progress on stderr."""
    return click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")(function)


def threads_option(function: Function) -> Function:
    """`--threads`; the runner takes no more than there are cores."""
    kind = click.IntRange(min=1)
    option = click.option("--threads", type=kind, metavar="N", help="[default: one a core]")
    return option(function)


class Progress:
    """Says on stderr what a long command is doing, each step with the time since the start."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._start = time.monotonic()

    def __call__(self, message: str) -> None:
        """Show one step."""
        if not self._quiet:
            print(
                f"[{time.monotonic() - self._start:6.1f} s] {message}", file=sys.stderr, flush=True
            )


def print_json(document: Any) -> None:
    """Write a document to stdout as JSON, readable by people too: lists of numbers stay on a line."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    print(NUMBERS.sub(lambda match: re.sub(r"\s+", " ", match[0]), text))


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """Lay rows in columns: `left` columns flush left, the rest (numbers) flush right."""
    cells = [list(header), *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join(
        [line(cells[0]), line(["-" * width for width in widths]), *map(line, cells[1:])]
    )


def format_bytes(count: int) -> str:
    """A size for people: 1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def split_names(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> list[str]:
    """Click callback for a repeatable option whose values may hold several names, by commas."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]
