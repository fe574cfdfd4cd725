"""ArtifactWriter: all or nothing, reproducible, and safe beside other writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hybridge.artifacts import folders
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weight_shards import HEADER_BYTES
from hybridge.artifacts.weights import Origin

from .samples import HALF, WEIGHT, fill, sample_manifest, write_sample

NOWHERE = Origin(())


def everything(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_what_was_written_can_be_opened(artifact: Path) -> None:
    opened = open_artifact(artifact, verify="full")
    np.testing.assert_array_equal(opened.weight("a.weight"), WEIGHT)
    np.testing.assert_array_equal(opened.weight("b.weight"), HALF)
    assert opened.weights["b.weight"].dtype == "bfloat16"
    assert opened.weights["b.weight"].origin == Origin(("b1", "b2"), "concatenate")
    assert opened.read("graphs/decode.onnx") == b"a graph"


def test_same_input_gives_same_bytes(tmp_path: Path) -> None:
    first, second = write_sample(tmp_path / "a"), write_sample(tmp_path / "other" / "name")
    assert everything(first) == everything(second)


def test_shards_are_ordinary_safetensors(artifact: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = artifact / "weights/weights-00001.safetensors"
    with safetensors.safe_open(path, framework="np") as loaded:
        np.testing.assert_array_equal(loaded.get_tensor("a.weight"), WEIGHT)


def test_every_weight_is_aligned_in_its_file(artifact: Path) -> None:
    for entry in open_artifact(artifact).weights.values():
        assert entry.offset % 64 == 0


def test_many_weights_make_many_shards(tmp_path: Path) -> None:
    count = 2 * HEADER_BYTES // 200
    with ArtifactWriter(tmp_path / "a") as writer:
        for index in range(count):
            value = np.array([index], np.int32)
            writer.add_weight(f"layer.{index}." + "x" * 40, "int32", value, NOWHERE)
        writer.add_bytes("graphs/decode.onnx", b"")
        writer.finish(sample_manifest())
    opened = open_artifact(tmp_path / "a")
    assert len(list((tmp_path / "a/weights").iterdir())) > 1
    assert all(opened.weight(f"layer.{i}." + "x" * 40)[0] == i for i in range(count))


def test_a_weight_is_streamed_in_chunks(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        with writer.open_weight("w", "float32", (3, 4), NOWHERE) as stream:
            stream.write(WEIGHT[:1])
            stream.write(WEIGHT[1:].T.copy().T)  # not contiguous
        writer.add_bytes("graphs/decode.onnx", b"")
        writer.finish(sample_manifest())
    np.testing.assert_array_equal(open_artifact(tmp_path / "a").weight("w"), WEIGHT)


@pytest.mark.parametrize("size", [8, 16])
def test_a_weight_of_another_size_than_declared(tmp_path: Path, size: int) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        with (
            pytest.raises(ArtifactError, match=f"{size} bytes written, but float32 .3. holds 12"),
            writer.open_weight("w", "float32", (3,), NOWHERE) as stream,
        ):
            stream.write(bytes(size))
        with pytest.raises(ArtifactError, match="'w' is unfinished"):
            writer.open_weight("v", "float32", (3,), NOWHERE)


def test_a_name_is_given_once(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.add_absent("w", "float32", (3,), NOWHERE)
        with pytest.raises(ArtifactError, match="'w' was added already"):
            writer.add_absent("w", "float32", (3,), NOWHERE)
        writer.add_bytes("x", b"")
        for name in ("x", "manifest.json", "report.json"):
            with pytest.raises(ArtifactError, match="reserved or there"):
                writer.add_bytes(name, b"")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", ".", "a//b", "c:x"])
def test_a_path_stays_inside(tmp_path: Path, name: str) -> None:
    with (
        ArtifactWriter(tmp_path / "a") as writer,
        pytest.raises(ArtifactError, match="does not stay inside"),
    ):
        writer.add_bytes(name, b"x")


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.add_bytes("graphs/decode.onnx", b"x")
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with ArtifactWriter(tmp_path / "a") as writer:
            writer.add_bytes("graphs/decode.onnx", b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_contradicts_the_files_is_not_written(tmp_path: Path) -> None:
    with (
        ArtifactWriter(tmp_path / "a") as writer,
        pytest.raises(ArtifactError, match=r"graphs/decode.onnx.*not in its list"),
    ):
        writer.finish(sample_manifest())
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(artifact: Path) -> None:
    before = everything(artifact)
    with pytest.raises(ArtifactError, match="exists already") as caught:
        ArtifactWriter(artifact)
    assert "--overwrite" in caught.value.remedy
    assert everything(artifact) == before


def test_overwrite_replaces_in_one_step(artifact: Path) -> None:
    with ArtifactWriter(artifact, overwrite=True) as writer:
        fill(writer, tools={"numpy": "3"})
    assert open_artifact(artifact).manifest.tools == {"numpy": "3"}
    assert [p.name for p in artifact.parent.iterdir()] == [artifact.name]


def test_overwrite_without_an_atomic_swap(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_, **__: object())
    with ArtifactWriter(artifact, overwrite=True) as writer:
        fill(writer, tools={"numpy": "3"})
    assert open_artifact(artifact).manifest.tools == {"numpy": "3"}
    assert [p.name for p in artifact.parent.iterdir()] == [artifact.name]


def test_a_failed_overwrite_keeps_the_old(artifact: Path) -> None:
    before = everything(artifact)
    with ArtifactWriter(artifact, overwrite=True) as writer:
        writer.add_bytes("graphs/decode.onnx", b"half")
    assert everything(artifact) == before


def test_what_is_no_artifact_is_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1").write_text("x")
    with pytest.raises(ArtifactError, match="no hybridge artifact"):
        ArtifactWriter(folder, overwrite=True)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ArtifactError, match="no hybridge artifact"):
        ArtifactWriter(tmp_path / "link", overwrite=True)


def test_the_target_appears_while_writing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a") as slow:
        write_sample(tmp_path / "a", tools={"who": "fast"})
        with pytest.raises(ArtifactError, match="exists already"):
            fill(slow, tools={"who": "slow"})
    assert open_artifact(tmp_path / "a").manifest.tools == {"who": "fast"}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_concurrent_overwriters_and_a_reader(artifact: Path) -> None:
    """Whatever the order, a reader that looks up the folder's files sees one whole artifact."""

    def overwrite(who: str) -> None:
        for _ in range(5):
            with ArtifactWriter(artifact, overwrite=True) as writer:
                fill(writer, tools={"who": who})

    writers = [threading.Thread(target=overwrite, args=(who,)) for who in "ab"]
    for thread in writers:
        thread.start()
    while any(thread.is_alive() for thread in writers):
        assert (artifact / "manifest.json").is_file()  # never a moment without one
    for thread in writers:
        thread.join()
    assert open_artifact(artifact, verify="full").manifest.tools["who"] in "ab"
    assert [p.name for p in artifact.parent.iterdir()] == [artifact.name]


def test_a_killed_writer_leaves_no_artifact_and_is_cleaned_up(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from hybridge.artifacts.store import ArtifactWriter\n"
        "writer = ArtifactWriter(sys.argv[1])\n"
        "writer.add_bytes('graphs/decode.onnx', b'x')\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (left,) = tmp_path.iterdir()
    old = time.time() - 2 * 3600
    os.utime(left, (old, old))
    ArtifactWriter(tmp_path / "a").close()
    assert left.exists()  # its writer lives: it is not stale, however old
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "a").exists()
    os.utime(left, (old, old))
    write_sample(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("most_bytes", [4, HEADER_BYTES + 10])
def test_a_full_disk_is_named_and_leaves_nothing(full_disk, tmp_path: Path, most_bytes) -> None:
    target = tmp_path / "a"
    with (
        pytest.raises(ArtifactError, match=f"{target}: cannot be written: .*\n.*make room"),
        full_disk(most_bytes),
        ArtifactWriter(target) as writer,
    ):
        fill(writer)
    assert not list(tmp_path.iterdir())


def fail_within_a_weight(target: Path) -> None:
    with (
        ArtifactWriter(target) as writer,
        writer.open_weight("a", "float32", WEIGHT.shape, NOWHERE) as stream,
    ):
        stream.write(WEIGHT)
        raise RuntimeError("the reason")


def test_a_full_disk_hides_no_other_error(full_disk, tmp_path: Path) -> None:
    """What is buffered cannot be flushed when the writer gives up."""
    with full_disk(HEADER_BYTES + 1), pytest.raises(RuntimeError, match="the reason"):
        fail_within_a_weight(tmp_path / "a")
    assert not list(tmp_path.iterdir())
