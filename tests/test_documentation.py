"""Every command of the README and of docs/ is run, and its output compared with what is printed.

Fences of a page, in order, in one folder:

* ```console: lines after `$ ` are commands, the others their stdout. What a page shows must still be
  printed, in this order; numbers may differ, and newer lines may stand in between.
* ```bash, ```python: are run; they must succeed.
* ```sh, ```text and plain ones: are not run (what needs a network or minutes).

`python tests/test_documentation.py` writes the present output into the pages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(console|bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Step:
    """A command of a page and the output printed below it (None where none is compared)."""

    command: list[str]
    shown: str
    expected: str | None


def shell(text: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", text]


def steps_of(language: str, text: str) -> Iterator[Step]:
    if language == "python":
        yield Step([sys.executable, "-c", text], text, None)
    elif language == "bash":
        yield Step(shell(text), text, None)
    else:
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, expected = console_part(part)
            yield Step(shell(command), command, expected)


def console_part(part: str) -> tuple[str, str]:
    """A command, which goes on after a line that ends in a backslash, and its output."""
    lines = part.splitlines(keepends=True)
    length = next(i for i, line in enumerate(lines, 1) if not line.endswith("\\\n"))
    return "".join(lines[:length]).rstrip("\n"), "".join(lines[length:])


def run(step: Step, folder: Path) -> str:
    bin_folder = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": bin_folder + os.pathsep + os.environ["PATH"],
        # A page's Python may import torch before hybridge, which torch-npu would break.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    process = subprocess.run(
        step.command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, f"$ {step.shown}\n{process.stdout}{process.stderr}"
    return COLOURS.sub("", process.stdout)


def without_numbers(text: str) -> list[str]:
    """Lines in a form that stays the same from run to run and from machine to machine."""
    lines = (
        re.sub(r"-{2,}", "--", re.sub(r"\d[\d.e+-]*", "#", line)) for line in text.splitlines()
    )
    lines = (re.sub(r"(\W)#( #)+", r"\1#", re.sub(r"\s+", " ", line).strip()) for line in lines)
    return [re.sub(r"# ?([KMG]?i?B|ms|s)\b", "# UNIT", line) for line in lines if line]


def still_printed(expected: list[str], actual: list[str]) -> bool:
    """Whether the expected lines are among the actual ones, in order."""
    rest = iter(actual)
    return all(line in rest for line in expected)


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_make_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?<=`)make ([a-z]+)", page.read_text(encoding="utf-8")))
        named |= set(re.findall(r"^make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, page.name


@pytest.fixture
def workspace(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Empty for the README; the pages of docs/ find its `ckpt` and `art` there."""
    if "README" not in request.node.name:
        for name, fixture in (("ckpt", "tiny_checkpoint"), ("art", "tiny_artifact")):
            (tmp_path / name).symlink_to(request.getfixturevalue(fixture))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_and_print_what_the_page_shows(page: Path, workspace: Path) -> None:
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        for step in steps_of(language, text):
            actual = run(step, workspace)
            if step.expected is not None:
                wanted, found = without_numbers(step.expected), without_numbers(actual)
                assert still_printed(wanted, found), (
                    f"{page.name}: $ {step.shown}\nprints now\n{actual}\n"
                    "If that is right, run: python tests/test_documentation.py"
                )


def test_what_counts_as_still_printed() -> None:
    assert still_printed(["a", "d"], ["a", "b", "c", "d"])
    assert still_printed([], ["a"])
    assert not still_printed(["a"], ["b"])
    assert not still_printed(["b", "a"], ["a", "b"])
    assert without_numbers("x  1.5 s\n\n--- 12") == without_numbers("x 20 ms\n---- 7")


def rewrite(page: Path, folder: Path) -> None:
    """Put the present output of every console command into a page, where more than numbers changed."""

    def renewed(match: re.Match[str]) -> str:
        language, text = match.groups()
        blocks = [(step, run(step, folder)) for step in steps_of(language, text)]
        if language != "console":
            return match.group(0)
        return "```console\n" + "".join(renewed_step(*block) for block in blocks) + "```"

    page.write_text(FENCE.sub(renewed, page.read_text(encoding="utf-8")), encoding="utf-8")


def renewed_step(step: Step, actual: str) -> str:
    assert step.expected is not None
    same = without_numbers(step.expected) == without_numbers(actual)
    return f"$ {step.shown}\n{step.expected if same else actual}"


def main() -> None:
    for page in PAGES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if page.name != "README.md":
                run(Step(shell(PREPARE), PREPARE, None), folder)
            rewrite(page, folder)
            print(page.relative_to(ROOT))


PREPARE = """
hybridge checkpoint new -q --preset kimi-k3.1-tiny --layers 4 ckpt
hybridge compile -q ckpt -o art
"""

if __name__ == "__main__":
    main()
