"""Random checkpoints: the published format, the same bytes for a seed, all or nothing."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hybridge.artifacts.errors import CheckpointError, UsageError
from hybridge.models import mxfp4, new_checkpoint
from hybridge.models.checkpoint import Checkpoint, load_state
from hybridge.models.config import load_config
from hybridge.models.new_checkpoint import checkpoint_bytes, random_tensor, write_checkpoint
from hybridge.models.presets import preset, scale
from hybridge.models.tensor_names import published_tensors

TINY = preset("kimi-k3.1-tiny")


def contents(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["kimi-k3.1-tiny", "kimi-k3-tiny", "kimi-linear-tiny"])
@pytest.mark.parametrize("mxfp4_experts", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_reads_back(name, mxfp4_experts, dtype, tmp_path):
    config = scale(preset(name), dtype=dtype, mxfp4=mxfp4_experts)
    write_checkpoint(config, tmp_path / "new", seed=3)
    assert load_config(tmp_path / "new") == config
    checkpoint = Checkpoint.open(tmp_path / "new")
    state = load_state(checkpoint, config)
    assert state["model.norm.weight"].dtype == getattr(torch, dtype)
    assert all(region.offset % 4 == 0 for region in checkpoint.regions.values())
    for tensor in published_tensors(config):
        assert torch.equal(random_tensor(tensor, config, 3), checkpoint.tensor(tensor.name))


def test_other_readers_accept_the_file(tmp_path):
    write_checkpoint(scale(TINY, mxfp4=True, dtype="bfloat16"), tmp_path / "new")
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("language_model.lm_head.weight").dtype == torch.bfloat16


def test_same_seed_same_bytes(tmp_path):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(TINY, tmp_path / folder, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


def test_bytes_are_those_of_every_machine():
    """The digest of one tensor; if it changes, checkpoints made before cannot be made again."""
    tensor = next(published_tensors(TINY))
    values = random_tensor(tensor, TINY, 0)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "fd4e040fe2d736aa"


def test_values_do_not_depend_on_sharding_or_pieces(tmp_path, monkeypatch):
    config = scale(TINY, mxfp4=True)
    write_checkpoint(config, tmp_path / "one")
    monkeypatch.setattr(new_checkpoint, "_PIECE", 100)
    write_checkpoint(config, tmp_path / "many", shard_bytes=200_000)
    one, many = Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "many")
    assert one.regions.keys() == many.regions.keys()
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.regions)


def test_shards_and_index(tmp_path):
    messages: list[str] = []
    write_checkpoint(TINY, tmp_path / "new", shard_bytes=300_000, progress=messages.append)
    names = sorted(f.name for f in (tmp_path / "new").glob("*.safetensors"))
    assert len(names) == len(messages) > 5
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == checkpoint_bytes(TINY)
    assert sorted(set(index["weight_map"].values())) == names
    assert messages[-1].startswith(names[-1])
    sizes = [(tmp_path / "new" / name).stat().st_size for name in names]
    assert max(sizes) < 330_000


def test_folder_that_is_not_empty(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not empty"):
        write_checkpoint(TINY, tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_empty_and_nested_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    write_checkpoint(TINY, tmp_path / "empty")
    write_checkpoint(TINY, tmp_path / "a" / "b")
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b")


def test_interruption_leaves_nothing(tmp_path):
    def stop(message: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(TINY, tmp_path / "new", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_too_large_for_the_disk(tmp_path):
    config = scale(preset("kimi-k3.1-pro"), mxfp4=False)
    with pytest.raises(UsageError, match=r"the checkpoint takes \d{4}\.\d GiB"):
        write_checkpoint(config, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(TINY, tmp_path / "file" / "new")
    with pytest.raises(UsageError, match="shard_bytes is 0"):
        write_checkpoint(TINY, tmp_path / "new", shard_bytes=0)


def test_scales_are_realistic():
    config = scale(preset("kimi-k3.1-demo"), mxfp4=True)
    values = {
        t.name.removeprefix("language_model.model."): random_tensor(t, config, 0)
        for t in published_tensors(config)
    }
    kda, dsa = "layers.0.self_attn.", "layers.3.self_attn."
    assert values[f"{kda}q_proj.weight"].std() == pytest.approx(256**-0.5, rel=0.02)
    assert values["layers.0.input_layernorm.weight"].mean() == pytest.approx(1, abs=0.03)
    assert values[f"{dsa}indexer.k_norm.bias"].abs().max() < 0.5
    assert values["layers.1.block_sparse_moe.gate.e_score_correction_bias"].abs().max() < 0.1
    a_log = values[f"{kda}A_log"]
    assert a_log.shape == (128,)
    assert a_log[4:].eq(0).all()
    assert a_log[:4].abs().max() <= 0.5
    assert values[f"{kda}dt_bias"].min() >= -6.9
    expert = "layers.1.block_sparse_moe.experts.0.w2.weight_"
    weights = mxfp4.decode(values[f"{expert}packed"], values[f"{expert}scale"])
    assert weights.std() == pytest.approx(96**-0.5, rel=0.05)


def test_softplus_gate_has_the_wider_decay_rates():
    config = preset("kimi-linear-tiny")
    tensor = next(t for t in published_tensors(config) if t.role == "decay_rate")
    values = random_tensor(tensor, config, 0)
    assert values.shape == (1, 1, 4, 1)
    assert 0 <= values.min() <= values.max() <= math.log(16)
