"""The presets: published sizes, the golden ones, and scaling that stays consistent."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_data import FOLDER as GOLDEN
from hybridge.artifacts.errors import CheckpointError, UsageError
from hybridge.models.config import config_from_dict, load_config
from hybridge.models.presets import layer_pattern, preset, preset_names, scale
from hybridge.models.tensor_names import parameter_count


def test_published_sizes_give_the_published_parameter_counts():
    assert round(parameter_count(preset("kimi-linear-48b-a3b")) / 1e9) == 49
    assert round(parameter_count(preset("kimi-k3")) / 1e12, 1) == 2.8
    assert round(parameter_count(preset("kimi-k3.1-pro")) / 1e12, 1) == 2.8


def test_published_layer_patterns():
    assert [i + 1 for i, k in enumerate(layer_pattern(27, "mla")) if k == "mla"] == [
        *range(4, 25, 4),
        27,
    ]
    k3 = preset("kimi-k3.1-pro")
    assert [i + 1 for i in k3.full_attention_layers] == [*range(4, 93, 4), 93]
    assert len(k3.kda_layers) == 69


def test_tiny_presets_are_the_golden_models():
    for name in ("kimi-k3.1-tiny", "kimi-k3-tiny"):
        assert preset(name) == load_config(GOLDEN / name)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "eos_token_ids": (2,), "pad_token_id": 0}
    linear = dataclasses.replace(preset("kimi-linear-tiny"), **ids)
    assert linear == load_config(GOLDEN / "kimi-linear-tiny")


def test_mxfp4_tiny_is_the_golden_model():
    config = scale(preset("kimi-k3.1-tiny"), mxfp4=True)
    assert config == load_config(GOLDEN / "kimi-k3.1-tiny-mxfp4")
    assert scale(config, mxfp4=False) == preset("kimi-k3.1-tiny")


def test_demo_is_small():
    config = preset("kimi-k3.1-demo")
    assert 20e6 < 4 * parameter_count(config) < 40e6
    assert config.dsa.top_k == 64


def test_unknown_preset():
    with pytest.raises(UsageError, match="no preset 'kimi-k4'") as caught:
        preset("kimi-k4")
    assert "kimi-k3.1-tiny" in caught.value.remedy


def test_scale_without_changes_changes_nothing():
    for name in preset_names():
        assert scale(preset(name)) == preset(name)
        config = preset(name)
        same = scale(config, layers=config.num_layers, hidden=config.hidden_size)
        assert same == config


def test_scale_shrinks_what_depends_on_it():
    config = scale(
        preset("kimi-k3.1-pro"), layers=8, hidden=512, experts=8, dtype="float32", mxfp4=False
    )
    assert config.layer_kinds == layer_pattern(8, "dsa")
    assert config.attn_res_block_size == 4
    assert (config.num_heads, config.kda.num_heads, config.kda.head_dim) == (6, 6, 128)
    assert (config.moe.num_experts, config.moe.top_k) == (8, 8)
    assert config.moe.latent_size == 256
    assert config.dtype == "float32"
    assert config.quantization is None


@given(
    st.sampled_from(preset_names()),
    st.integers(1, 100),
    st.integers(1, 4096),
    st.integers(1, 64),
    st.booleans(),
)
def test_every_scaled_config_is_consistent(name, layers, hidden, experts, mxfp4):
    base = preset(name)
    # Without a latent, the experts' input is the hidden size itself.
    hidden = hidden * 32 if mxfp4 and base.moe.latent_size is None else hidden
    config = scale(base, layers=layers, hidden=hidden, experts=experts, mxfp4=mxfp4)
    assert config_from_dict(config.to_published()) == config
    assert config.layer_kinds[-1] != "kda"
    assert config.hidden_size == hidden
    assert config.moe.top_k <= config.moe.num_experts == experts
    assert (config.quantization is not None) == mxfp4


def test_scale_refuses_what_mxfp4_cannot_divide():
    with pytest.raises(CheckpointError, match="MXFP4 groups of 32 do not divide"):
        scale(preset("kimi-linear-tiny"), hidden=72, mxfp4=True)
