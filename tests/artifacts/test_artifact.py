"""Opening an artifact: what was changed after it was made is found before it is used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from hybridge.artifacts import artifact as artifact_module
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.canonical import digest
from hybridge.artifacts.errors import ArtifactError, UsageError
from hybridge.artifacts.safetensors import read_header, write
from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin

from .samples import WEIGHT, sample_manifest

FILES = (
    "graphs/decode.onnx",
    "weights/weights-00001.safetensors",
    "weights.json",
    "golden/one.safetensors",
)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_found(artifact: Path, name: str) -> None:
    data = bytearray((artifact / name).read_bytes())
    data[-1] ^= 1
    (artifact / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{name}: sha256"):
        open_artifact(artifact)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found(artifact: Path, name: str) -> None:
    os.truncate(artifact / name, 3)
    with pytest.raises(ArtifactError, match=f"{name}: 3 bytes, the manifest says"):
        open_artifact(artifact)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(artifact: Path, name: str) -> None:
    (artifact / name).unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        open_artifact(artifact)


def test_a_link_is_not_followed(artifact: Path, tmp_path: Path) -> None:
    name = "graphs/decode.onnx"
    (artifact / name).rename(tmp_path / "elsewhere")
    (artifact / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="symbolic link"):
        open_artifact(artifact)


def test_a_linked_folder_is_not_followed(artifact: Path, tmp_path: Path) -> None:
    (artifact / "graphs").rename(tmp_path / "elsewhere")
    (artifact / "graphs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="symbolic link"):
        open_artifact(artifact)


def test_a_fifo_does_not_hang(artifact: Path) -> None:
    name = "graphs/decode.onnx"
    (artifact / name).unlink()
    os.mkfifo(artifact / name)
    with pytest.raises(ArtifactError, match="not a regular file"):
        open_artifact(artifact)


def test_the_artifact_itself_may_be_a_link(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(artifact)
    assert open_artifact(tmp_path / "current").manifest.target == "cpu"


def test_an_expected_digest_is_held(artifact: Path) -> None:
    found = open_artifact(artifact).digest
    assert open_artifact(artifact, expected_digest=found).digest == found
    with pytest.raises(ArtifactError, match="expected 00"):
        open_artifact(artifact, expected_digest="00")


def rewrite_weights(root: Path, **changes: object) -> None:
    """Change the first entry of weights.json, with all hashes made right again."""
    content = json.loads((root / "weights.json").read_text())
    content["weights"][0] |= changes
    data = json.dumps(content).encode()
    (root / "weights.json").write_bytes(data)
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["files"]["weights.json"] = {"size": len(data), "sha256": digest(data)}
    (root / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "../../etc/passwd"}, "does not stay inside"),
        ({"file": "/etc/passwd"}, "does not stay inside"),
        ({"file": "weights/other.safetensors"}, "lists no file"),
        ({"offset": 1 << 60}, "which has only"),
        ({"offset": -4}, "at least 0"),
        ({"length": 4}, "4 bytes do not hold float32"),
        ({"shape": [1 << 40, 4], "length": 4 << 42}, "which has only"),
        ({"dtype": "float99"}, "unknown element type"),
        ({"place": "internet"}, "is none of"),
        ({"sha256": ""}, "no sha256"),
        ({"name": "b.weight"}, "listed twice"),
        ({"code": "print()"}, "unknown fields"),
    ],
)
def test_a_false_weight_entry_is_refused(artifact: Path, changes: dict, message: str) -> None:
    rewrite_weights(artifact, **changes)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(artifact)


def test_a_file_that_is_not_listed_cannot_be_read(artifact: Path) -> None:
    (artifact / "extra").write_text("x")
    with pytest.raises(ArtifactError, match="lists no file 'extra'"):
        open_artifact(artifact).read("extra")


def test_a_file_that_changes_after_opening_is_found(artifact: Path) -> None:
    opened = open_artifact(artifact)
    (artifact / "graphs/decode.onnx").write_bytes(b"A graph")
    with pytest.raises(ArtifactError, match="sha256"):
        opened.read("graphs/decode.onnx")


def test_weights_are_mapped_not_copied(artifact: Path) -> None:
    opened = open_artifact(artifact)
    first, second = opened.weight("a.weight"), opened.weight("a.weight")
    assert first.ctypes.data == second.ctypes.data
    assert not first.flags.writeable
    with pytest.raises(ArtifactError, match="lists no weight 'c'"):
        opened.weight("c")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder / "model.safetensors", {"first": np.zeros(3, np.float32), "w": WEIGHT})
    return folder


@pytest.fixture
def referring(tmp_path: Path, checkpoint: Path) -> Path:
    entry = read_header(checkpoint / "model.safetensors").tensors["w"]
    with ArtifactWriter(tmp_path / "referring") as writer:
        writer.add_bytes("graphs/decode.onnx", b"")
        writer.add_reference(
            "w",
            entry.dtype,
            entry.shape,
            checkpoint=checkpoint,
            file="model.safetensors",
            offset=entry.offset,
            origin=Origin(("w",)),
        )
        writer.finish(sample_manifest(weights_policy="reference"))
    return tmp_path / "referring"


def test_a_reference_is_read_from_the_checkpoint(referring: Path, checkpoint: Path) -> None:
    opened = open_artifact(referring, verify="full")
    np.testing.assert_array_equal(opened.weight("w"), WEIGHT)
    assert str(checkpoint) not in (referring / "manifest.json").read_text()
    assert str(checkpoint) not in (referring / "weights.json").read_text()


def test_a_moved_checkpoint_is_named_by_the_user(referring: Path, checkpoint: Path) -> None:
    moved = checkpoint.rename(checkpoint.with_name("moved"))
    with pytest.raises(ArtifactError, match="is not there") as caught:
        open_artifact(referring)
    assert "--weights-dir" in caught.value.remedy
    np.testing.assert_array_equal(open_artifact(referring, weights_dir=moved).weight("w"), WEIGHT)
    (referring / "weights/reference.json").unlink()
    with pytest.raises(ArtifactError, match="not named"):
        open_artifact(referring)


def test_a_hub_cache_of_links_is_a_checkpoint(referring: Path, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.rename(checkpoint / "blob")
    file.symlink_to("blob")
    np.testing.assert_array_equal(open_artifact(referring).weight("w"), WEIGHT)


def test_a_changed_checkpoint_is_found(
    referring: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ArtifactError, match="weight 'w': the bytes in"):
        open_artifact(referring)
    monkeypatch.setattr(artifact_module, "SMALL_WEIGHTS_BYTES", 0)
    open_artifact(referring)  # large weights: sizes only, unless asked for
    with pytest.raises(ArtifactError, match="weight 'w': the bytes in"):
        open_artifact(referring, verify="full")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ArtifactError, match="has only"):
        open_artifact(referring).weight("w")


def test_a_region_outside_the_checkpoint_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        for file, offset in (("model.safetensors", 10**6), ("absent.safetensors", 0)):
            with pytest.raises(ArtifactError, match="has no bytes"):
                writer.add_reference(
                    "w",
                    "float32",
                    (3,),
                    checkpoint=checkpoint,
                    file=file,
                    offset=offset,
                    origin=Origin(("w",)),
                )


def test_absent_weights_say_how_to_get_them(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.add_bytes("graphs/decode.onnx", b"")
        writer.add_absent("w", "bfloat16", (1 << 20, 1 << 20), Origin(("w",)))
        writer.finish(sample_manifest(weights_policy="none"))
    opened = open_artifact(tmp_path / "a", verify="full")
    with pytest.raises(ArtifactError, match="--weights none") as caught:
        opened.weight("w")
    assert "--weights copy" in caught.value.remedy


def test_an_unknown_way_to_verify_is_refused(artifact: Path) -> None:
    with pytest.raises(UsageError, match="verify 'FULL' is not known"):
        open_artifact(artifact, verify="FULL")  # type: ignore[arg-type]
