"""Opening checkpoints, making parameters from them, and everything that is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from golden_data import EVERY
from golden_data import FOLDER as GOLDEN
from hybridge.artifacts.errors import CheckpointError
from hybridge.models import checkpoint as checkpoint_module
from hybridge.models.checkpoint import Checkpoint, load_state
from hybridge.models.config import load_config
from hybridge.models.tensor_names import plain_name, weight_sources

K31 = "kimi-k3.1-tiny"
LAYER = "language_model.model.layers.0."


def plain_tensors(name: str) -> dict[str, Tensor]:
    held = load_file(GOLDEN / name / "model.safetensors")
    return {plain_name(key): value for key, value in held.items()}


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the K3.1 golden checkpoint after a change of its tensors."""

    def make(change: Callable[[dict[str, Tensor]], object]) -> Path:
        tensors = load_file(GOLDEN / K31 / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        shutil.copy(GOLDEN / K31 / "config.json", tmp_path)
        return tmp_path

    return make


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The K3.1 golden checkpoint in two shards."""
    tensors = load_file(GOLDEN / K31 / "model.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    write_index(tmp_path, weight_map)
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder).check(load_config(GOLDEN / K31))
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("name", EVERY)
def test_parameters_are_made_of_their_tensors(name):
    config = load_config(GOLDEN / name)
    tensors = plain_tensors(name)
    state = load_state(Checkpoint.open(GOLDEN / name), config)
    kda = "model.layers.0.self_attn."
    conv = torch.cat([tensors[f"{kda}{part}_conv1d.weight"][:, 0] for part in "qkv"])
    assert torch.equal(state[f"{kda}conv_weight"], conv)
    heads = config.kda.num_heads
    assert torch.equal(state[f"{kda}A_log"], tensors[f"{kda}A_log"].flatten()[:heads])
    suffixes = ("_packed", "_scale") if config.quantization else ("",)
    experts = "model.layers.2.block_sparse_moe.experts."
    for suffix in suffixes:
        w1, w3, w2 = (
            torch.stack([tensors[f"{experts}{e}.{part}.weight{suffix}"] for e in range(8)])
            for part in ("w1", "w3", "w2")
        )
        assert torch.equal(state[f"{experts}gate_up{suffix}"], torch.cat((w1, w3), dim=1))
        assert torch.equal(state[f"{experts}down{suffix}"], w2)
    assert torch.equal(state["model.norm.weight"], tensors["model.norm.weight"])


def test_dtype_of_the_state():
    config = load_config(GOLDEN / "kimi-k3.1-tiny-mxfp4")
    state = load_state(Checkpoint.open(GOLDEN / "kimi-k3.1-tiny-mxfp4"), config, torch.bfloat16)
    assert state["model.norm.weight"].dtype == torch.bfloat16
    assert state["model.layers.0.self_attn.A_log"].dtype == torch.float32
    packed = "model.layers.1.block_sparse_moe.experts.gate_up_packed"
    assert state[packed].dtype == torch.uint8


def test_names_with_and_without_the_prefix():
    checkpoint = Checkpoint.open(GOLDEN / K31)
    assert torch.equal(
        checkpoint.tensor("lm_head.weight"), checkpoint.tensor("language_model.lm_head.weight")
    )
    with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head\.bias'"):
        checkpoint.tensor("lm_head.bias")


def test_dense_mlp_under_the_name_of_the_experts():
    checkpoint = Checkpoint.open(GOLDEN / "kimi-linear-tiny")
    assert checkpoint.region("model.layers.0.mlp.up_proj.weight").shape == (96, 64)


def test_regions_refer_to_the_bytes():
    checkpoint = Checkpoint.open(GOLDEN / K31)
    for source in weight_sources(load_config(GOLDEN / K31)):
        if source.transform == "as_is":
            region = checkpoint.region(source.tensors[0])
            data = region.file.read_bytes()[region.offset : region.offset + region.length]
            assert checkpoint.materialise(source).numpy().tobytes() == data


def test_writing_to_a_mapped_tensor_leaves_the_file(changed):
    folder = changed(lambda tensors: None)
    checkpoint = Checkpoint.open(folder)
    before = (folder / "model.safetensors").read_bytes()
    checkpoint.tensor("model.norm.weight").fill_(7.0)
    assert (folder / "model.safetensors").read_bytes() == before
    assert not bool((checkpoint.tensor("model.norm.weight") == 7.0).any())


def test_materialise_into_a_buffer():
    config = load_config(GOLDEN / K31)
    checkpoint = Checkpoint.open(GOLDEN / K31)
    for source in weight_sources(config):
        buffer = torch.empty(source.shape, dtype=torch.float64)
        filled = checkpoint.materialise(source, out=buffer)
        assert filled is buffer
        assert torch.equal(filled, checkpoint.materialise(source).double())
    with pytest.raises(CheckpointError, match="buffer for"):
        checkpoint.materialise(source, out=torch.empty(1))


def test_unaligned_tensors_are_read(tmp_path):
    expected = torch.tensor([1.5, -2.0])
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    content = len(header).to_bytes(8, "little") + header + b"\7" + expected.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.tensor("b"), expected)


def test_shards(sharded: Path):
    config = load_config(GOLDEN / K31)
    whole = load_state(Checkpoint.open(GOLDEN / K31), config)
    parts = load_state(Checkpoint.open(sharded), config)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    "shard", ["../one.safetensors", "/tmp/one.safetensors", "a\\b.safetensors"]
)
def test_index_that_leaves_the_folder(shard, sharded: Path):
    write_index(sharded, {"lm_head.weight": shard})
    error = refusal(sharded)
    assert "which is no file name of this folder" in error.message
    assert "do not use this checkpoint" in error.remedy


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"x": 5}, "puts 'x' into 5"),
        ({"x": "one.bin"}, "puts 'x' into 'one.bin'"),
        ({"x": "one.safetensors"}, "says that 'x' is in one.safetensors, but it is not"),
        ({"x": "three.safetensors"}, "three.safetensors: cannot be read"),
    ],
)
def test_damaged_index(weight_map, text, sharded: Path):
    write_index(sharded, weight_map)
    assert text in refusal(sharded).message


def test_index_that_is_no_json(sharded: Path):
    (sharded / "model.safetensors.index.json").write_text("{")
    assert "cannot be read as JSON" in refusal(sharded).message


def test_tensor_in_two_shards(sharded: Path):
    shutil.copy(sharded / "one.safetensors", sharded / "three.safetensors")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    first = next(name for name, shard in index.items() if shard == "one.safetensors")
    write_index(sharded, index | {first: "three.safetensors"})
    assert "is also in" in refusal(sharded).message


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    error = refusal(tmp_path)
    assert "holds pickled weights (pytorch_model.bin)" in error.message
    assert "never opened" in error.remedy
    assert "never opened" in refusal(tmp_path / "pytorch_model.bin").remedy


def test_folders_without_weights(tmp_path):
    assert "has neither model.safetensors nor" in refusal(tmp_path).message
    assert "is not a checkpoint folder" in refusal(tmp_path / "absent").message


def test_all_problems_at_once(changed):
    def change(tensors: dict[str, Tensor]) -> None:
        for layer in range(8):
            del tensors[f"language_model.model.layers.{layer}.input_layernorm.weight"]
        tensors["language_model.model.stray.weight"] = torch.zeros(1)
        tensors["language_model.lm_head.weight"] = torch.zeros(5, 64)
        tensors[f"{LAYER}mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.float16)
        expert = "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight"
        tensors[expert] = tensors[expert].bfloat16()

    message = refusal(changed(change)).message
    assert "8 missing: language_model.model.layers.0.input_layernorm.weight," in message
    assert "and 4 more" in message
    assert "1 unexpected: model.stray.weight" in message
    assert "lm_head.weight (is [5, 64], must be [256, 64])" in message
    assert "mlp.up_proj.weight (is F16, must be BF16 or F32)" in message
    assert (
        "1 of mixed dtype: model.layers.1.block_sparse_moe.experts.gate_up (BF16, F32)" in message
    )


def test_experts_of_the_other_storage():
    with pytest.raises(CheckpointError, match=r"missing: .*w1\.weight_packed"):
        Checkpoint.open(GOLDEN / K31).check(load_config(GOLDEN / "kimi-k3.1-tiny-mxfp4"))


def test_vision_and_mtp_are_skipped(changed):
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["vision_tower.patch.weight"] = torch.zeros(1)
        tensors["mm_projector.proj.0.weight"] = torch.zeros(1)
        tensors["language_model.model.layers.8.eh_proj.weight"] = torch.zeros(1)

    config = load_config(GOLDEN / K31)
    state = load_state(Checkpoint.open(changed(change)), config)
    assert len(state) == sum(1 for _ in weight_sources(config))


@pytest.mark.parametrize("shape", [(4,), (128,), (1, 1, 4, 1)])
def test_every_published_form_of_a_log(shape, changed):
    def change(tensors: dict[str, Tensor]) -> None:
        padded = torch.zeros(shape).flatten()
        padded[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        tensors[f"{LAYER}self_attn.A_log"] = padded.reshape(shape)

    state = load_state(Checkpoint.open(changed(change)), load_config(GOLDEN / K31))
    assert state["model.layers.0.self_attn.A_log"].tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("shape", [(3,), (4, 4), (64, 2)])
def test_other_forms_of_a_log_are_refused(shape, changed):
    folder = changed(
        lambda tensors: tensors.update({f"{LAYER}self_attn.A_log": torch.zeros(shape)})
    )
    assert "A_log (is" in refusal(folder).message


def test_convolutions_without_their_middle_dimension(changed):
    name = f"{LAYER}self_attn.k_conv1d.weight"
    folder = changed(lambda tensors: tensors.update({name: tensors[name][:, 0].clone()}))
    config = load_config(GOLDEN / K31)
    state = load_state(Checkpoint.open(folder), config)
    same = load_state(Checkpoint.open(GOLDEN / K31), config)
    key = "model.layers.0.self_attn.conv_weight"
    assert torch.equal(state[key], same[key])


def test_file_that_shrinks_after_opening(changed):
    folder = changed(lambda tensors: None)
    checkpoint = Checkpoint.open(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10_000])
    with pytest.raises(CheckpointError, match="is shorter than when it was opened"):
        checkpoint.tensor("model.norm.weight")


def test_unsupported_dtype(tmp_path):
    save_file({"x": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'x' has the unsupported dtype C64"):
        Checkpoint.open(tmp_path).tensor("x")


def test_nothing_here_can_unpickle():
    source = Path(checkpoint_module.__file__).read_text()
    assert "torch.load" not in source
    assert "import pickle" not in source
