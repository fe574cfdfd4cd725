"""The verbs on a real (tiny) model, one after the other as a person would use them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from hybridge.artifacts.manifest import FileEntry, read_manifest
from hybridge.artifacts.safetensors import read_tensors
from hybridge.cli import main

Capture = pytest.CaptureFixture[str]


def output_of(capsys: Capture, *arguments: object) -> str:
    """Run a verb that must succeed; return its stdout."""
    capsys.readouterr()
    code = main([str(word) for word in arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def json_of(capsys: Capture, *arguments: object) -> Any:
    return json.loads(output_of(capsys, *arguments, "--json", *quiet(arguments)))


def quiet(arguments: tuple[object, ...]) -> list[str]:
    return [] if arguments[0] in {"inspect"} or "presets" in arguments else ["--quiet"]


def failure_of(capsys: Capture, *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main([str(word) for word in arguments])
    return code, capsys.readouterr().err


def test_presets_include_the_published_sizes(capsys: Capture) -> None:
    presets = json_of(capsys, "checkpoint", "presets")["presets"]
    assert {"kimi-k3.1-pro", "kimi-k3", "kimi-linear-48b-a3b"} <= presets.keys()
    assert presets["kimi-k3.1-pro"]["layers"] == 93


def test_checkpoint_new_is_reproducible(capsys: Capture, tmp_path: Path) -> None:
    sizes = ["--preset", "kimi-k3-tiny", "--layers", 4, "--experts", 4, "--mxfp4", "--seed", 3]
    for name in ("a", "b"):
        made = json_of(capsys, "checkpoint", "new", *sizes, tmp_path / name)
    assert (made["layers"], made["experts"], made["mxfp4"]) == (4, 4, True)
    for name in made["files"]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_checkpoint_new_refuses_a_full_folder(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    code, message = failure_of(
        capsys, "checkpoint", "new", "--preset", "kimi-k3-tiny", "--quiet", tmp_path
    )
    assert code == 2
    assert "not empty" in message


def test_compile_one_phase_with_some_passes(
    capsys: Capture, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    options = ["--phase", "decode", "--passes", "fuse_lightning_indexer,canonicalise"]
    made = json_of(capsys, "compile", tiny_checkpoint, "-o", tmp_path / "art", *options)
    assert list(made["phases"]) == ["decode"]
    names = [record["name"] for record in made["passes"]["decode"]]
    assert names == ["canonicalise", "fuse_lightning_indexer"]


def test_compile_a_preset_without_weights(capsys: Capture, tmp_path: Path) -> None:
    made = json_of(
        capsys, "compile", "kimi-linear-tiny", "-o", tmp_path / "art", "--weights", "none"
    )
    assert made["weights"] == "none"
    code, message = failure_of(capsys, "run", tmp_path / "art", "--ids", "1,2")
    assert code == 5
    assert "--weights none" in message


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        (["--passes", "fuse_everything"], 2, "fuse_everything"),
        (["--phase", "training"], 2, "training"),
        (["--target", "toaster"], 2, "toaster"),
        (["--weights", "some"], 2, "some"),
        (["--block-size", "0"], 2, "block-size"),
    ],
)
def test_compile_refuses_what_it_does_not_know(
    options: list[str], code: int, part: str, capsys: Capture, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    found, message = failure_of(
        capsys, "compile", tiny_checkpoint, "-o", tmp_path / "art", "--quiet", *options
    )
    assert found == code
    assert part in message
    assert not (tmp_path / "art").exists()


def test_a_broken_checkpoint_is_code_3(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kimi_linear"}')
    code, message = failure_of(capsys, "compile", tmp_path, "-o", tmp_path / "art", "--quiet")
    assert code == 3
    assert "config.json" in message


def test_inspect_says_what_each_pass_did(capsys: Capture, tiny_artifact: Path) -> None:
    passes = json_of(capsys, "inspect", tiny_artifact)["passes"]
    assert list(passes) == ["prefill", "decode"]
    for records in passes.values():
        for record in records:
            assert record.keys() >= {
                "name",
                "matches",
                "expected",
                "refusals",
                "nodes_before",
                "nodes_after",
                "seconds",
            }
            assert record["matches"] >= record["expected"]
            assert record["seconds"] >= 0
    table = output_of(capsys, "inspect", tiny_artifact)
    assert all(record["name"] in table for record in passes["prefill"])


def test_inspect_one_pass(capsys: Capture, tiny_artifact: Path) -> None:
    text = output_of(capsys, "inspect", tiny_artifact, "--pass", "fuse_lightning_indexer")
    assert "fuse_lightning_indexer, prefill" in text
    code, message = failure_of(capsys, "inspect", tiny_artifact, "--pass", "fuse_toast")
    assert code == 2
    assert "canonicalise" in message


def test_inspect_shows_a_refusal_with_rule_reason_and_remedy() -> None:
    from hybridge.commands.report import describe_pass

    refusal = {"node": "sort_3", "rule": "shared", "reason": "add_7 reads it", "remedy": "copy"}
    record = {
        "name": "fuse_x",
        "matches": 1,
        "expected": 1,
        "refusals": [refusal],
        "nodes_before": 9,
        "nodes_after": 5,
        "seconds": 0.5,
        "extra": {},
    }
    text = describe_pass({"prefill": [record]})
    assert all(value in text for value in refusal.values())


def test_run_takes_a_prompt_from_anywhere(
    capsys: Capture, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-new-tokens", 5]
    first = json_of(capsys, "run", tiny_artifact, "--ids", "3,1,4,1,5,9,2,6", *options)
    assert first["prompt_ids"] == [3, 1, 4, 1, 5, 9, 2, 6]
    assert len(first["token_ids"]) == 5
    (tmp_path / "ids").write_text("3 1 4 1 5\n9 2 6\n")
    from_file = json_of(capsys, "run", tiny_artifact, "--ids-file", tmp_path / "ids", *options)
    monkeypatch.setattr("sys.stdin", io.StringIO("3 1 4 1 5 9 2 6"))
    from_stdin = json_of(capsys, "run", tiny_artifact, "--prefill-chunk", 3, *options)
    assert first["token_ids"] == from_file["token_ids"] == from_stdin["token_ids"]
    printed = output_of(capsys, "run", tiny_artifact, "--ids-file", tmp_path / "ids", *options)
    assert [int(word) for word in printed.split()] == first["token_ids"]


def test_run_ends_the_line_of_tokens_before_it_reports(tiny_artifact: Path) -> None:
    """Where both streams go into one file, and stdout is therefore buffered."""
    words = ("run", tiny_artifact, "--ids", "1,2,3", "--max-new-tokens", "2")
    process = subprocess.run(
        [sys.executable, "-P", "-m", "hybridge.cli", *map(str, words)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    tokens, report = process.stdout.splitlines()[-2:]
    assert re.fullmatch(r"\d+ \d+", tokens)
    assert report.startswith("loaded in")


def test_run_samples_by_seed(capsys: Capture, tiny_artifact: Path) -> None:
    options = ["--ids", "3,1,4", "--temperature", 1.5, "--top-k", 50, "--top-p", 0.99]
    runs = [
        json_of(capsys, "run", tiny_artifact, *options, "--seed", seed)["token_ids"]
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_run_writes_logits_of_every_position(
    capsys: Capture, tiny_artifact: Path, tmp_path: Path
) -> None:
    path = tmp_path / "logits.safetensors"
    options = ["--ids", "3,1,4,1,5", "--max-new-tokens", 4, "--logits", path]
    tokens = json_of(capsys, "run", tiny_artifact, *options)["token_ids"]
    written = read_tensors(path)
    assert written["logits"].dtype == np.float32
    assert written["logits"].shape == (9, 256)
    assert written["token_ids"].tolist() == [3, 1, 4, 1, 5, *tokens]
    assert written["logits"].argmax(-1)[4:8].tolist() == tokens


@pytest.fixture
def artifact_with_tokenizer(tiny_artifact: Path, tmp_path: Path) -> Path:
    """`tiny_artifact` with a tokenizer whose tokens are the 256 bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: place for place, letter in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    content = tokenizer.to_str().encode()

    folder = tmp_path / "art"
    shutil.copytree(tiny_artifact, folder)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(content)
    manifest, _ = read_manifest(folder)
    entry = FileEntry(len(content), hashlib.sha256(content).hexdigest())
    name = "tokenizer/tokenizer.json"
    manifest = replace(manifest, tokenizer=name, files={**manifest.files, name: entry})
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder


def test_run_takes_and_gives_text(
    capsys: Capture, artifact_with_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-new-tokens", 6]
    first = json_of(capsys, "run", artifact_with_tokenizer, "--prompt", "grüße", *options)
    assert len(first["prompt_ids"]) == 7
    assert first["text"]
    monkeypatch.setattr("sys.stdin", io.StringIO("grüße"))
    printed = output_of(capsys, "run", artifact_with_tokenizer, *options)
    assert printed == first["text"] + "\n"


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        (["--ids", "1,2,256"], 6, "256"),
        (["--ids", "1,2,x"], 2, "'x'"),
        (["--ids", ""], 2, "no token ids"),
        (["--prompt", "hello"], 6, "tokenizer"),
        (["--ids", "1", "--prompt", "hello"], 2, "more than one prompt"),
        (["--ids", "1", "--logits", "no/such/folder/file"], 2, "no/such/folder"),
    ],
)
def test_run_refuses_clearly(
    options: list[str], code: int, part: str, capsys: Capture, tiny_artifact: Path
) -> None:
    found, message = failure_of(capsys, "run", tiny_artifact, "--quiet", *options)
    assert found == code
    assert part in message
    assert "remedy:" in message


def test_verify_compares_with_golden_and_eager(capsys: Capture, tiny_artifact: Path) -> None:
    report = json_of(capsys, "verify", tiny_artifact, "--eager", "--full")
    assert report["ok"]
    assert {check["case"] for check in report["checks"]} == {"eager", "eager, now"}
    assert "ok" in output_of(capsys, "verify", tiny_artifact, "--no-eager", "--quiet")


def test_verify_needs_the_checkpoint_for_eager(
    capsys: Capture, tiny_artifact: Path, tmp_path: Path
) -> None:
    code, message = failure_of(
        capsys, "verify", tiny_artifact, "--eager", "--checkpoint", tmp_path / "gone", "--quiet"
    )
    assert code in {2, 5}
    assert "gone" in message


def test_interrupting_a_long_command_is_quick_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "hybridge.cli", "checkpoint", "new"]
    options = ["--preset", "kimi-k3.1-bench", str(tmp_path / "ckpt")]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=30)
    assert process.returncode == 130
    assert message.endswith("interrupted\n")
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []
