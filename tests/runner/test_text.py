from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import RunError
from hybridge.artifacts.store import ArtifactWriter
from hybridge.artifacts.weights import Origin
from hybridge.runner.text import load_text

from .toy_model import Toy, toy_graph, toy_manifest

TEXT = "naïve 模型 🙂!"


def write_with_tokenizer(path: Path, content: bytes) -> Path:
    toy = Toy()
    with ArtifactWriter(path) as writer:
        for phase in ("prefill", "decode"):
            writer.add_bytes(f"graphs/{phase}.onnx", toy_graph(toy))
        writer.add_bytes("tokenizer/tokenizer.json", content)
        writer.add_weight("embed", "float32", toy.embed, Origin(("e",)))
        writer.finish(replace(toy_manifest(toy), tokenizer="tokenizer/tokenizer.json"))
    return path


@pytest.fixture
def byte_tokenizer() -> bytes:
    """A tokenizer whose tokens are single bytes, so that characters are split over tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer.to_str().encode()


def test_there_and_back(tmp_path: Path, byte_tokenizer: bytes) -> None:
    text = load_text(open_artifact(write_with_tokenizer(tmp_path / "a", byte_tokenizer)))
    tokens = text.encode(TEXT)
    assert len(tokens) == len(TEXT.encode())
    assert text.decode(tokens) == TEXT


def test_a_stream_never_splits_a_character(tmp_path: Path, byte_tokenizer: bytes) -> None:
    text = load_text(open_artifact(write_with_tokenizer(tmp_path / "a", byte_tokenizer)))
    pieces = list(text.stream(iter(text.encode(TEXT))))
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) == len(TEXT)
    cut = list(text.stream(text.encode("a🙂")[:3]))
    assert cut[0] == "a"
    assert "\ufffd" in cut[-1]  # what is incomplete in the end is shown as such


def test_a_stream_keeps_the_spaces_between_words(tmp_path: Path) -> None:
    """A decoder that drops the space of the first token it sees must see it once only."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"\u2581one": 0, "\u2581two": 1, "\u2581three": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "\u2581one"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    path = write_with_tokenizer(tmp_path / "a", tokenizer.to_str().encode())
    text = load_text(open_artifact(path))
    pieces = list(text.stream([0, 1, 2, 2, 0]))
    assert pieces == ["one", " two", " three", " three", " one"]


def test_no_tokenizer(toy_artifact: Path) -> None:
    with pytest.raises(RunError, match=r"no tokenizer.json") as caught:
        load_text(open_artifact(toy_artifact))
    assert "--ids" in caught.value.remedy


def test_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = open_artifact(write_with_tokenizer(tmp_path / "a", b"{}"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RunError, match="tokenizers package") as caught:
        load_text(artifact)
    assert "hybridge[text]" in caught.value.remedy


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    artifact = open_artifact(write_with_tokenizer(tmp_path / "a", b"{}"))
    with pytest.raises(RunError, match="not a usable tokenizer"):
        load_text(artifact)
