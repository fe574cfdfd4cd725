"""Where `hybridge run` takes its prompt from: options, a file or standard input."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hybridge.artifacts.errors import UsageError


def parse_ids(text: str, source: str) -> list[int]:
    """Token ids separated by commas or white space, with or without brackets around them.

    Raises:
        UsageError: something in between is no token id.
    """
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip(" ,\n"))
    wrong = [word for word in words if not (word.isascii() and word.isdigit())]
    if words == [""]:
        raise UsageError(f"{source} holds no token ids", "give at least one, such as 1,2,3")
    if wrong:
        raise UsageError(
            f"{source}: {wrong[0]!r} is no token id",
            "give ids separated by commas or white space, such as 1,2,3",
        )
    return [int(word) for word in words]


def read_prompt(
    prompt: str | None, ids: str | None, ids_file: Path | None, *, has_tokenizer: bool
) -> str | list[int]:
    """The prompt as text or as token ids, from the one source that was given.

    Standard input is read when no option is given: text where the artifact has a tokenizer, token
    ids where it has none.

    Raises:
        UsageError: several sources, none, or one that cannot be read.
    """
    given = [value for value in (prompt, ids, ids_file) if value is not None]
    if len(given) > 1:
        raise UsageError("more than one prompt", "give one of --prompt, --ids, --ids-file")
    if prompt is not None:
        return prompt
    if ids is not None:
        return parse_ids(ids, "--ids")
    if ids_file is not None:
        return parse_ids(_read_text(ids_file), str(ids_file))
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    if not text.strip():
        raise UsageError("no prompt", "give --prompt, --ids or --ids-file, or pipe one in")
    return text if has_tokenizer else parse_ids(text, "standard input")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "name a text file of ids") from None
