"""`compile --cache`: what is served again, and what makes it another compilation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden_data import FOLDER
from hybridge import cli
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.cache import CompileCache, Miss
from hybridge.artifacts.canonical import digest_file
from hybridge.artifacts.errors import ArtifactError, UsageError
from hybridge.compiler import cache_key, compile_model
from hybridge.compiler import compile as compiling
from hybridge.compiler.build import CompileOptions
from hybridge.compiler.cache_key import cache_fields
from hybridge.compiler.source import open_source
from hybridge.compiler.targets.ascend.options import AscendOptions

CHECKPOINT = FOLDER / "kimi-linear-tiny"


def fields(
    checkpoint: Path = CHECKPOINT,
    ascend: AscendOptions | None = None,
    golden: bool = True,
    **options: Any,
) -> dict[str, Any]:
    chosen = CompileOptions(**options)
    model = open_source(checkpoint, with_weights=chosen.weights != "none")
    return cache_fields(model, chosen, ascend, golden=golden)


def differing(changed: dict[str, Any], tmp_path: Path, tiny_artifact: Path) -> list[str]:
    """The fields by which a miss is explained, with one entry in the cache."""
    kept = CompileCache(tmp_path / "cache")
    kept.put(fields(), tiny_artifact)
    assert kept.get(fields()) is not None
    assert kept.get(changed) is None
    miss: Miss = kept.explain_miss(changed)
    return [each.field for each in miss.differences]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"block_size": 16}, ["options.block_size"]),
        ({"activations": "bfloat16"}, ["options.activations"]),
        ({"passes": ("canonicalise",)}, ["options.passes", "options.passes.0"]),
        ({"golden": False}, ["golden"]),
        ({"ascend": AscendOptions("ascend-950")}, None),
    ],
)
def test_an_option_is_part_of_the_key(
    change: dict[str, Any], expected: list[str] | None, tmp_path: Path, tiny_artifact: Path
) -> None:
    found = differing(fields(**change), tmp_path, tiny_artifact)
    if expected is None:
        assert all(field.startswith("ascend") for field in found)
    else:
        assert found == expected


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_the_checkpoint_is_part_of_the_key(file: str, tmp_path: Path, tiny_artifact: Path) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, copy)
    if file == "config.json":
        config = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps({**config, "transformers_version": "0"}))
    elif file == "tokenizer.json":
        (copy / file).write_text("{}")
    else:
        data = bytearray((copy / file).read_bytes())
        data[-1] ^= 1
        (copy / file).write_bytes(data)
    wanted = {
        "model.safetensors": "weights.model.safetensors",
        "config.json": "config.transformers_version",
        "tokenizer.json": "tokenizer",
    }
    # An artifact that refers to the checkpoint names its folder.
    found = differing(fields(copy), tmp_path, tiny_artifact)
    assert found == sorted([wanted[file], "weights.folder"])
    assert "folder" not in fields(copy, weights="copy")["weights"]


sources = cache_key._sources


def edited() -> dict[str, str]:
    return {**sources(), "ops/kda.py": "another"}


def library(path: Path) -> Path:
    path.write_bytes(b"another library")
    return path


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m, _: m.setattr(cache_key, "__version__", "9.9.9"), "hybridge"),
        (
            lambda m, p: m.setenv("HYBRIDGE_KERNELS_LIBRARY", str(library(p / "kernels.so"))),
            "kernels",
        ),
        (
            lambda m, _: m.setattr(cache_key, "_sources", edited),
            "sources.ops/kda.py",
        ),
        (lambda m, _: m.setattr(cache_key, "_version", lambda name: f"{name} 0"), "tools"),
    ],
)
def test_what_compiles_is_part_of_the_key(
    change: Callable[[pytest.MonkeyPatch, Path], None],
    field: str,
    tmp_path: Path,
    tiny_artifact: Path,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        change(patch, tmp_path)
        changed = fields()
    found = differing(changed, tmp_path, tiny_artifact)
    assert found
    assert all(name == field or name.startswith(f"{field}.") for name in found)


def test_every_source_of_a_room_that_compiles_is_hashed() -> None:
    found = fields()["sources"]
    root = Path(compiling.__file__).parent
    assert found["compiler/compile.py"] == digest_file(root / "compile.py")
    assert {"passes/fuse_kda.py", "ops/kda.py", "ir/spec.py", "models/kda.py"} <= set(found)


def test_a_second_compilation_is_served_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "cache")
    common = ["--weights", "none", "--phase", "decode", "--passes", "none", "--cache", kept]

    def compiled(name: str, *more: str) -> tuple[int, str]:
        code = cli.main(["compile", str(CHECKPOINT), "-o", str(tmp_path / name), *common, *more])
        return code, capsys.readouterr().err

    code, said = compiled("first")
    assert code == 0
    assert "cache: not there: the cache is empty" in said
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("it compiled again"))
    code, said = compiled("second")
    assert code == 0
    assert f"cache: copied from {kept}, nothing to compile" in said
    first, second = (tmp_path / name / "manifest.json" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    code, said = compiled("second")
    assert code == ArtifactError.exit_code
    assert "exists already" in said
    assert compiled("second", "--overwrite")[0] == 0
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        compiled("third", "--block-size", "16")
    assert "options.block_size: 16, cached with 64" in capsys.readouterr().err


@pytest.mark.parametrize(("output", "cache"), [("art", "art"), ("art", "art/sub"), (".", "cache")])
def test_a_cache_in_the_artifact_is_refused(output: str, cache: str, tmp_path: Path) -> None:
    """The artifact would be copied into itself, or replace the cache."""
    with pytest.raises(UsageError, match="lies in the artifact"):
        compile_model(CHECKPOINT, tmp_path / output, cache=tmp_path / cache)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is no folder"):
        compile_model(CHECKPOINT, tmp_path / "art", cache=tmp_path / "file")


def test_a_cache_that_cannot_be_written_costs_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "art"
    with pytest.warns(UserWarning, match=f"{out} is whole, but not in the cache: .*file/cache"):
        compile_model(
            CHECKPOINT, out, phases=["decode"], passes=[], cache=tmp_path / "file" / "cache"
        )
    open_artifact(out)
