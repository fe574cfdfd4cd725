"""Prompts from options, files and standard input."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from hybridge.artifacts.errors import UsageError
from hybridge.commands.prompt import parse_ids, read_prompt


@pytest.mark.parametrize(
    "text", ["1,2,3", "1 2 3", " 1, 2 ,3\n", "[1, 2, 3]", "1\n2\n3\n", "1,2,3,", "001,2,3"]
)
def test_ids_in_any_usual_form(text: str) -> None:
    assert parse_ids(text, "--ids") == [1, 2, 3]


@pytest.mark.parametrize("text", ["1,-2", "1.5", "one", "1,2,x", "٣", "1e3"])
def test_what_is_no_id_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"--ids: .* is no token id"):
        parse_ids(text, "--ids")


@pytest.mark.parametrize("text", ["", " \n", "[]"])
def test_no_ids(text: str) -> None:
    with pytest.raises(UsageError, match="no token ids"):
        parse_ids(text, "--ids")


def test_one_source_only() -> None:
    with pytest.raises(UsageError, match="more than one prompt"):
        read_prompt("hello", "1,2", None, has_tokenizer=True)


def test_an_ids_file(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text("5 6\n7\n")
    assert read_prompt(None, None, path, has_tokenizer=True) == [5, 6, 7]


def test_an_ids_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompt(None, None, tmp_path / "none", has_tokenizer=False)


@pytest.mark.parametrize(("has_tokenizer", "expected"), [(True, "4 5\n"), (False, [4, 5])])
def test_standard_input(
    has_tokenizer: bool, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("4 5\n"))
    assert read_prompt(None, None, None, has_tokenizer=has_tokenizer) == expected


def test_nothing_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(UsageError, match="no prompt"):
        read_prompt(None, None, None, has_tokenizer=False)
