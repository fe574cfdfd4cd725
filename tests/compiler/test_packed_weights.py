"""An artifact with packed weights: fewer bytes, the same values, with and without the native library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.weights import WeightFiles, read_weights
from hybridge.compiler import compile_model
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.new_checkpoint import write_checkpoint
from hybridge.models.presets import preset, scale
from hybridge.ops.packed_rows import unpack_rows
from hybridge.runner import load
from hybridge.runner.verify import verify_golden


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for rows that gain: two KDA layers, experts, one sparse attention."""
    folder = tmp_path_factory.mktemp("packed") / "ckpt"
    config = scale(preset("kimi-k3.1-tiny"), layers=3, hidden=512, experts=3, dtype="bfloat16")
    write_checkpoint(config, folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> Path:
    folder = checkpoint.parent / "art"
    compile_model(checkpoint, folder, weights="packed", activations="bfloat16")
    return folder


def test_what_products_read_is_packed_and_the_rest_says_why(packed: Path) -> None:
    weights = read_weights(packed / "weights.json")
    unpacked = open_artifact(packed).manifest.target_data["cpu"]["unpacked"]
    head = weights["lm_head.weight"]
    assert (head.place, head.dtype, head.shape) == ("artifact", "uint8", (256, 832))
    experts = weights["model.layers.1.block_sparse_moe.experts.gate_up"]
    assert experts.dtype == "uint8"
    merged = weights["model.layers.0.self_attn.q_proj.kda_in.weight"]
    assert (merged.dtype, merged.shape) == ("uint8", (2096, 832))
    assert "takes no packed rows" in unpacked["model.embed_tokens.weight"]
    bf16 = {n for n, each in weights.items() if each.dtype == "bfloat16" and len(each.shape) > 1}
    assert bf16 == set(unpacked)


def test_every_bit_of_a_weight_is_there(checkpoint: Path, packed: Path) -> None:
    entry = read_weights(packed / "weights.json")["lm_head.weight"]
    words = unpack_rows(WeightFiles(packed, None).array(entry))
    stored = Checkpoint.open(checkpoint).tensor("lm_head.weight")
    np.testing.assert_array_equal(words, stored.view(torch.uint16).numpy())


@pytest.mark.parametrize("native", [True, False])
def test_it_computes_what_the_eager_model_does(packed: Path, native: bool) -> None:
    with load(packed, use_native=native, verify="full") as engine:
        verify_golden(engine).raise_if_wrong()


def test_a_changed_byte_is_found(packed: Path) -> None:
    entry = read_weights(packed / "weights.json")["lm_head.weight"]
    path = packed / entry.file
    with path.open("r+b") as file:
        file.seek(entry.offset)
        byte = file.read(1)
        file.seek(entry.offset)
        file.write(bytes([byte[0] ^ 1]))
        try:
            file.flush()
            with pytest.raises(ArtifactError, match="sha256"):
                load(packed, verify="full")
        finally:
            file.seek(entry.offset)
            file.write(byte)


def test_weights_that_do_not_fit_stay_as_they_are(tmp_path: Path) -> None:
    """Rows of the smallest models are too short: the artifact is that of `copy`."""
    source, folder = tmp_path / "ckpt", tmp_path / "art"
    write_checkpoint(scale(preset("kimi-linear-tiny"), layers=2, dtype="bfloat16"), source, seed=0)
    compile_model(source, folder, weights="packed", phases=["decode"])
    weights = read_weights(folder / "weights.json")
    assert not [name for name, each in weights.items() if each.dtype == "uint8"]
    assert {each.place for each in weights.values()} == {"artifact"}
