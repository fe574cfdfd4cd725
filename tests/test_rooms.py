"""The rooms: imports flow down, the runner carries no torch, names explain themselves."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Room -> the rooms below it, as docs/architecture.md tells; a room may always import itself.
BELOW: dict[str, set[str]] = {
    "artifacts": set(),
    "kernels": set(),
    "ops": set(),
    "ir": set(),
    "models": {"ops"},
    "passes": {"ops", "ir"},
    "runner": {"artifacts", "kernels"},
    "compiler": {"passes", "models", "ops", "artifacts", "ir", "kernels"},
}
ROOMS = sorted(BELOW)
TORCH_FREE = ("artifacts", "kernels", "runner")

# The floor under every room: the errors all of them raise, and the version they may state, as
# `from hybridge import __version__` or `import hybridge`.
FLOOR = {"hybridge", "hybridge.__version__", "hybridge.artifacts.errors"}


def source_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(("hybridge", *parts))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, those inside functions too, as (line, absolute dotted name)."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def room_of(dotted: str) -> str | None:
    """The room an import reaches into; "hybridge" for the top floor, None for other packages."""
    parts = dotted.split(".")
    if parts[0] != "hybridge":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else "hybridge"


def on_the_floor(dotted: str) -> bool:
    return dotted in FLOOR or dotted.startswith("hybridge.artifacts.errors.")


@pytest.mark.parametrize("room", ROOMS)
def test_imports_flow_down(room: str) -> None:
    climbs = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files(room)
        for line, name in imported_names(path)
        if room_of(name) not in {None, room, *BELOW[room]} and not on_the_floor(name)
    ]
    assert not climbs, f"{room} may import only {sorted(BELOW[room])}:\n" + "\n".join(climbs)


def test_the_table_itself_has_no_cycle() -> None:
    def reach(room: str, above: tuple[str, ...]) -> None:
        assert room not in above, f"cycle: {' -> '.join((*above, room))}"
        for lower in BELOW[room]:
            reach(lower, (*above, room))

    for room in ROOMS:
        reach(room, ())


@pytest.mark.parametrize("room", TORCH_FREE)
def test_no_torch_in_the_source_of(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in source_files(room)
        for line, name in imported_names(path)
        if name.split(".")[0] in {"torch", "onnx", "onnxscript", "onnx_ir", "torch_npu"}
    ]
    assert not found, "\n".join(found)


# Imports every module of the given rooms, then prints which heavy packages came along.
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        importlib.import_module(module.name)
heavy = {"torch", "onnx", "onnxscript", "onnx_ir", "transformers", "sympy"}
print(*sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize("modules", [["hybridge.runner", "hybridge.artifacts"], ["hybridge.cli"]])
def test_no_torch_comes_along_with(modules: list[str]) -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, *modules],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == []


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    names = [name.decode() for name in listing.stdout.split(b"\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    found = [path for path in tracked_files() if path.stem in drawers]
    assert not found, "name a file after what is in it"


def test_no_path_of_a_machine_is_in_the_tree() -> None:
    # Built so that this line does not match itself.
    machine = re.compile(
        rb"(?<![\w.])/(?:" + b"|".join((b"root", b"home", b"work", b"Users")) + rb")/\w"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files()
        if path.suffix != ".safetensors"
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
        if machine.search(line)
    ]
    assert not found, "\n".join(found)


def test_every_room_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = settings["tool"]["scikit-build"]["wheel"]["packages"]
    assert packages == {"hybridge": "hybridge"} | {f"hybridge/{room}": room for room in ROOMS}
