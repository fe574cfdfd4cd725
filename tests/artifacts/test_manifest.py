"""manifest.json: strict in what it accepts, the same bytes for the same content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.manifest import (
    FileEntry,
    Report,
    parse_manifest,
    passes_with_seconds,
    read_manifest,
    read_report,
)

from .samples import sample_manifest

FILES = {"graphs/decode.onnx": FileEntry(3, "0" * 64)}


def test_round_trip() -> None:
    manifest = sample_manifest(files=FILES)
    data = manifest.to_bytes()
    assert parse_manifest(data) == manifest
    assert parse_manifest(data).to_bytes() == data


def changed(path: str, value: Any) -> bytes:
    """The sample's JSON with one field replaced (or removed, with ...)."""
    content = json.loads(sample_manifest(files=FILES).to_bytes())
    *parents, name = [int(p) if p.isdigit() else p for p in path.split("/")]
    place = content
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema version 2; this hybridge reads version 1"),
        ("schema_version", True, "must be an integer"),
        ("schema_version", ..., "'schema_version' is missing"),
        ("surprise", 1, r"unknown fields \['surprise'\]"),
        ("model/surprise", 1, r"manifest.json.model: unknown fields"),
        ("model/config_digest", "abc", "no sha256"),
        ("defaults/block_size", 0, "at least 1"),
        ("defaults/block_size", 4.0, "must be an integer"),
        ("states/0/kind", "kv", "none of latent"),
        ("states/0/shape", ["pages", 1], "known are blocks"),
        ("states/0/dtype", "float7", "unknown element type"),
        ("weights_policy", "guess", "none of reference, copy, packed, none"),
        ("phases/decode/graph", "graphs/other.onnx", "not in its list of files"),
        ("phases/decode/inputs", {}, "must be a list"),
        ("phases/decode/buckets", [{"T": 0}], "at least 1"),
        ("passes/decode/0/matches", "1", "must be an integer"),
        ("tokenizer", "tokenizer.json", "not in its list of files"),
        ("files", {"../x": {"size": 1, "sha256": "0" * 64}}, "does not stay inside"),
        ("files", {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}, "does not stay inside"),
        ("files", {"a/./b": {"size": 1, "sha256": "0" * 64}}, "does not stay inside"),
        ("files", {"a\\b": {"size": 1, "sha256": "0" * 64}}, "does not stay inside"),
        ("files", {"a": {"size": -1, "sha256": "0" * 64}}, "at least 0"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        parse_manifest(changed(path, value))
    assert caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"a": NaN}', b'{"a":1,"a":2}', b"[" * 10**5])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError):
        parse_manifest(data)


def test_a_folder_that_is_no_artifact(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ArtifactError, match="no hybridge artifact"):
            read_manifest(folder)


def test_seconds_are_beside_the_manifest(artifact: Path) -> None:
    manifest, data = read_manifest(artifact)
    assert b"seconds" not in data
    (record,) = passes_with_seconds(manifest, read_report(artifact))["decode"]
    assert record["seconds"] == 0.25
    assert record["refusals"][0]["reason"] == "its scores are used twice"
    assert record["extra"] == {"largest_difference": 1e-6}


def test_a_lost_or_broken_report_is_no_harm(artifact: Path) -> None:
    (artifact / "report.json").write_text("{")
    assert read_report(artifact) == Report()
    (artifact / "report.json").unlink()
    assert read_report(artifact) == Report()
