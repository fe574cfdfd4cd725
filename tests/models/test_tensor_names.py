"""The tensor table against the golden files, the published counts and the eager model."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from safetensors import safe_open

from golden_data import EVERY
from golden_data import FOLDER as GOLDEN
from hybridge.models.config import load_config
from hybridge.models.model import HybridModel
from hybridge.models.presets import preset, preset_names, scale
from hybridge.models.tensor_names import (
    ExpertNames,
    is_skipped,
    plain_name,
    published_tensors,
    weight_sources,
)


@pytest.mark.parametrize("name", EVERY)
def test_table_is_what_the_golden_files_hold(name):
    config = load_config(GOLDEN / name)
    with safe_open(GOLDEN / name / "model.safetensors", "pt") as file:
        held = {plain_name(key): tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    expected = {plain_name(t.name): t.shape for t in published_tensors(config)}
    assert expected == held


def test_prefix_of_each_family():
    names = {n: {t.name for t in published_tensors(preset(n))} for n in preset_names()[-1:]}
    assert "lm_head.weight" in names["kimi-linear-tiny"]
    k3 = {t.name for t in published_tensors(preset("kimi-k3-tiny"))}
    assert {"language_model.lm_head.weight", "language_model.model.norm.weight"} <= k3


def test_full_size_tables_are_lazy_and_quick():
    start = time.monotonic()
    count = sum(1 for _ in published_tensors(preset("kimi-k3")))
    # The published 497,220 hold the vision tower too.
    assert 497_000 < count < 497_220
    assert sum(1 for _ in weight_sources(preset("kimi-k3.1-pro"))) == 2810
    assert time.monotonic() - start < 30


def test_published_shapes_of_k31_pro():
    tensors = itertools.takewhile(
        lambda t: ".layers.4." not in t.name, published_tensors(preset("kimi-k3.1-pro"))
    )
    shapes = {t.name.removeprefix("language_model.model.layers."): t.shape for t in tensors}
    assert shapes["0.mlp.gate_proj.weight"] == (33792, 7168)
    assert shapes["0.self_attn.A_log"] == (128,)
    assert shapes["1.self_attn.g_proj.weight"] == (12288, 7168)
    assert shapes["1.self_attn.q_conv1d.weight"] == (12288, 1, 4)
    assert shapes["1.block_sparse_moe.experts.895.w1.weight_packed"] == (3072, 1792)
    assert shapes["1.block_sparse_moe.experts.895.w2.weight_scale"] == (3584, 96)
    assert shapes["1.block_sparse_moe.shared_experts.down_proj.weight"] == (7168, 6144)
    assert shapes["3.self_attn.q_b_proj.weight"] == (96 * 192, 1536)
    assert shapes["3.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["3.self_attn.kv_b_proj.weight"] == (96 * 256, 512)
    assert shapes["3.self_attn.indexer.wq_b.weight"] == (4096, 1536)
    assert shapes["3.self_attn.indexer.weights_proj.weight"] == (32, 7168)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("mxfp4", [False, True])
def test_sources_use_every_tensor_once_and_fill_their_parameter(name, mxfp4):
    config = scale(preset(name), layers=5, experts=4, mxfp4=mxfp4)
    sizes = {plain_name(t.name): math.prod(t.shape) for t in published_tensors(config)}
    used = []
    for source in weight_sources(config):
        used.extend(source.tensors)
        total = sum(sizes[tensor] for tensor in source.tensors)
        assert total == source.numel or source.transform == "slice_flat"
        assert (len(source.tensors) == 1) == (source.transform in ("as_is", "slice_flat"))
    assert sorted(used) == sorted(sizes)


@pytest.mark.parametrize("name", EVERY)
def test_sources_are_the_parameters_of_the_eager_model(name):
    config = load_config(GOLDEN / name)
    with torch.device("meta"):
        model = HybridModel(config)
    parameters = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert {source.name: source.shape for source in weight_sources(config)} == parameters


def test_names_are_distinct():
    for name in preset_names():
        names = [t.name for t in published_tensors(scale(preset(name), layers=4, experts=2))]
        assert len(set(names)) == len(names)


def test_expert_names_are_a_sequence():
    names = ExpertNames("model.layers.1", 3, ("w1.weight", "w3.weight"))
    assert len(names) == 6
    assert names[1] == "model.layers.1.block_sparse_moe.experts.0.w3.weight"
    assert names[-1] == names[5] == "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert list(names)[2:4] == names[2:4]
    with pytest.raises(IndexError):
        names[6]


@pytest.mark.parametrize(
    ("published", "plain"),
    [
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.layers.0.block_sparse_moe.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        (
            "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
            "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight",
        ),
        (
            "model.layers.1.block_sparse_moe.routed_expert_up_proj.weight",
            "model.layers.1.block_sparse_moe.routed_expert_up_proj.weight",
        ),
    ],
)
def test_plain_names(published, plain):
    assert plain_name(published) == plain


def test_vision_and_mtp_are_skipped():
    config = preset("kimi-k3.1-tiny")
    assert is_skipped("vision_tower.blocks.0.weight", config)
    assert is_skipped("mm_projector.proj.0.weight", config)
    assert is_skipped("model.layers.8.eh_proj.weight", config)
    assert not is_skipped("model.layers.7.input_layernorm.weight", config)
    assert not is_skipped("model.stray.weight", config)
