"""The compile cache: every field that decides the result makes a miss, explained by its name."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridge.artifacts import artifact as opening
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.cache import CompileCache
from hybridge.artifacts.errors import ArtifactError

FIELDS: dict[str, Any] = {
    "config": {"layers": 4, "draft_tokens": 7},
    "ops": {"paged_write": "paged_write(Tensor(a!) cache) -> ()"},
    "pipeline": ["canonicalise", "fuse_kda"],
    "options": {"static": True},
    "tools": {"torch": "2.13.0"},
}


@pytest.fixture
def cache(tmp_path: Path, artifact: Path) -> CompileCache:
    made = CompileCache(tmp_path / "cache")
    made.put(FIELDS, artifact)
    return made


def with_field(path: str, value: Any) -> dict[str, Any]:
    fields = copy.deepcopy(FIELDS)
    *parents, name = path.split("/")
    place = fields
    for parent in parents:
        place = place[parent]
    place[name] = value
    return fields


def test_a_hit(cache: CompileCache) -> None:
    reordered = dict(reversed(FIELDS.items()))
    found = cache.get(reordered)
    assert found is not None
    assert (found / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("config/draft_tokens", 9, "config.draft_tokens"),
        ("config/draft_tokens", 7.0, "config.draft_tokens"),
        ("ops/paged_write", "paged_write(Tensor cache) -> Tensor", "ops.paged_write"),
        ("pipeline", ["canonicalise", "fuse_kda", "fuse_moe"], "pipeline.2"),
        ("options/verify", True, "options.verify"),
        ("options/static", 1, "options.static"),
        ("tools/torch", "2.13.1", "tools.torch"),
        ("options", {}, "options"),
    ],
)
def test_a_miss_names_the_field(cache: CompileCache, path: str, value: Any, field: str) -> None:
    fields = with_field(path, value)
    assert cache.get(fields) is None
    miss = cache.explain_miss(fields)
    assert field in [difference.field for difference in miss.differences]
    assert field in str(miss)


def test_a_long_explanation_is_cut(cache: CompileCache) -> None:
    many = {**FIELDS, "sources": {f"{place}.py": str(place) for place in range(9)}}
    text = str(cache.explain_miss(many))
    assert "sources.0.py: '0', cached with '(absent)'" in text
    assert text.endswith("; and 4 more")


def test_an_entry_is_copied_out_and_replaces_only_if_asked(
    cache: CompileCache, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert not cache.copy_to(with_field("pipeline", []), out, overwrite=False)
    assert not out.exists()
    assert cache.copy_to(FIELDS, out, overwrite=False)
    open_artifact(out)
    (out / "manifest.json").write_text("damaged")
    with pytest.raises(ArtifactError, match="exists already"):
        cache.copy_to(FIELDS, out, overwrite=False)
    assert cache.copy_to(FIELDS, out, overwrite=True)
    open_artifact(out)
    assert cache.get(FIELDS) is not None


def test_the_nearest_entry_explains(cache: CompileCache, artifact: Path) -> None:
    near = with_field("config/draft_tokens", 9)
    cache.put(near, artifact)
    wanted = copy.deepcopy(near)
    wanted["tools"]["torch"] = "3"
    miss = cache.explain_miss(wanted)
    assert miss.nearest == cache.key(near)
    assert str(miss) == "tools.torch: '3', cached with '2.13.0'"


def test_an_empty_cache(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "absent")
    assert cache.get(FIELDS) is None
    assert str(cache.explain_miss(FIELDS)) == "the cache is empty"


def test_a_damaged_entry_is_a_miss_and_is_replaced(cache: CompileCache, artifact: Path) -> None:
    found = cache.get(FIELDS)
    assert found is not None
    (found / "graphs/decode.onnx").write_bytes(b"broken!")
    assert cache.get(FIELDS) is None
    assert "damaged" in str(cache.explain_miss(FIELDS))
    cache.put(FIELDS, artifact)
    assert cache.get(FIELDS) is not None


def test_a_large_weight_is_hashed_before_it_is_served(cache: CompileCache, monkeypatch) -> None:
    """Loading leaves large weights to their sizes; a copy out of the cache would hand the damage on."""
    monkeypatch.setattr(opening, "SMALL_WEIGHTS_BYTES", 0)
    found = cache.get(FIELDS)
    assert found is not None
    weights = found / "weights/weights-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    open_artifact(found)
    assert cache.get(FIELDS) is None


def test_a_full_disk_is_named_and_leaves_no_entry(
    full_disk, cache: CompileCache, artifact: Path, tmp_path: Path
) -> None:
    other, out = with_field("pipeline", []), tmp_path / "out"
    before = sorted(tmp_path.rglob("*"))
    with full_disk(100):
        with pytest.raises(ArtifactError, match=f"{cache.folder}: cannot be written: .*too large"):
            cache.put(other, artifact)
        with pytest.raises(ArtifactError, match=f"{out}: cannot be written: .*too large"):
            cache.copy_to(FIELDS, out, overwrite=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_process_local_value_is_no_key(cache: CompileCache) -> None:
    for value in (object(), float("nan"), {1, 2}):
        with pytest.raises(ArtifactError, match="cache key"):
            cache.get(with_field("options/handle", value))


def test_another_process_finds_the_entry(cache: CompileCache) -> None:
    code = (
        "import json, sys\n"
        "from hybridge.artifacts.cache import CompileCache\n"
        "print(CompileCache(sys.argv[1]).get(json.loads(sys.argv[2])))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(cache.folder), json.dumps(FIELDS)],
        capture_output=True,
        text=True,
        check=True,
        cwd=cache.folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"},
    )
    assert result.stdout.strip() == str(cache.get(FIELDS))
