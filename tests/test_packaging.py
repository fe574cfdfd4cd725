"""The wheel, installed alone in a clean environment outside the checkout, is a working runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import hybridge

ROOT = Path(__file__).resolve().parents[1]
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command in an environment that knows nothing of this one; return its stdout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HYBRIDGE"))}
    process = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert process.returncode == 0, f"{command}:\n{process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # The build folder of the editable install holds the compiled objects already.
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    run(sys.executable, *PIP, "wheel", *options, str(ROOT), cwd=folder)
    (built,) = folder.glob("hybridge-*.whl")
    return built


@pytest.fixture(scope="module")
def clean_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment that holds the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", *PIP, "install", wheel, cwd=folder)
    return folder / "bin"


def test_the_wheel_holds_the_rooms_the_library_and_no_sources_of_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "hybridge/py.typed" in names
    assert "hybridge/kernels/libhybridge_kernels.so" in names
    assert f"hybridge-{hybridge.__version__}.dist-info/licenses/LICENSE" in names
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package in settings["tool"]["scikit-build"]["wheel"]["packages"]:
        assert f"{package}/__init__.py" in names
    sources = (".cpp", ".h", ".map", ".clang-format", "CMakeLists.txt")
    assert not {name for name in names if name.endswith(sources)}
    assert {n.split("/")[0] for n in names} == {
        "hybridge",
        f"hybridge-{hybridge.__version__}.dist-info",
    }


def test_the_clean_environment_is_the_runner_alone(clean_environment: Path) -> None:
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    listing = run(clean_environment / "python", "-c", code, cwd=clean_environment)
    names = {name.lower().replace("_", "-") for name in listing.split()}
    assert {"hybridge", "numpy", "onnxruntime", "click"} <= names
    assert not names & {"torch", "onnx", "onnxscript", "onnx-ir", "safetensors", "tokenizers"}
    assert len(names - {"pip", "setuptools"}) <= 8  # with what numpy and onnxruntime bring


def test_a_compiled_artifact_runs_there(
    clean_environment: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    arguments = ["run", tiny_artifact, "--ids", "1,2,3,4,5", "--max-new-tokens", "6", "--json"]
    there = json.loads(run(clean_environment / "hybridge", *arguments, cwd=tmp_path))
    here = json.loads(run(Path(sys.executable).parent / "hybridge", *arguments, cwd=tmp_path))
    assert len(there["token_ids"]) == 6
    assert there["token_ids"] == here["token_ids"]


def test_the_artifact_verifies_there_without_torch(
    clean_environment: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    run(clean_environment / "hybridge", "verify", tiny_artifact, cwd=tmp_path)


def test_a_verb_that_needs_the_compiler_says_what_to_install(
    clean_environment: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    process = subprocess.run(
        [clean_environment / "hybridge", "compile", tiny_checkpoint, "-o", tmp_path / "artifact"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert "pip install 'hybridge[compile]'" in process.stderr
    assert "Traceback" not in process.stderr


def test_the_version_is_stated_once(clean_environment: Path) -> None:
    assert metadata.version("hybridge") == hybridge.__version__
    output = run(clean_environment / "hybridge", "--version", cwd=clean_environment)
    assert output.split()[-1] == hybridge.__version__


def test_build_requirements_are_pinned() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert all("==" in requirement for requirement in settings["build-system"]["requires"])
    assert {r.split("==")[0] for r in settings["build-system"]["requires"]} == {
        "scikit-build-core",
        "cmake",
        "ninja",
    }


def test_torch_npu_is_not_loaded_by_importing_torch() -> None:
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
