"""Reading the published configs: what they mean, and the text of every refusal."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_data import FOLDER as GOLDEN
from hybridge.artifacts.errors import CheckpointError
from hybridge.models.config import config_from_dict, load_config
from hybridge.models.presets import preset, preset_names

NAMES = ("kimi-k3.1-tiny", "kimi-k3.1-tiny-mxfp4", "kimi-k3-tiny", "kimi-linear-tiny")
K31 = "kimi-k3.1-tiny"


def raw(name: str) -> dict:
    """A golden config as fresh parsed JSON, to be broken by the test."""
    return json.loads((GOLDEN / name / "config.json").read_text())


def refusal(values: dict) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        config_from_dict(values, source="some/config.json")
    assert caught.value.message.startswith("some/config.json: ")
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    ("name", "family", "kinds"),
    [
        ("kimi-k3.1-tiny", "kimi_k3.1", ["kda"] * 3 + ["dsa"] + ["kda"] * 3 + ["dsa"]),
        ("kimi-k3-tiny", "kimi_k3", ["kda"] * 3 + ["mla"] + ["kda"] * 3 + ["mla"]),
        ("kimi-linear-tiny", "kimi_linear", ["kda"] * 3 + ["mla"]),
    ],
)
def test_families_and_layers_counted_from_zero(name, family, kinds):
    config = load_config(GOLDEN / name)
    assert config.family == family
    assert list(config.layer_kinds) == kinds
    assert config.unknown_fields == ()
    assert config.full_attention_layers == tuple(i for i, k in enumerate(kinds) if k != "kda")
    assert config.moe_layers == tuple(range(1, len(kinds)))


def test_values_of_the_k31_golden():
    config = load_config(GOLDEN / K31 / "config.json")
    assert config.projection_size == 64
    assert config.latent_size_per_token == 40
    assert config.softmax_scale == 24**-0.5
    assert config.expert_size == 32
    assert (config.dsa.num_heads, config.dsa.head_dim, config.dsa.top_k) == (16, 16, 8)
    assert config.kda.gate_lower_bound == -5.0
    assert config.kda.full_rank_gate
    assert config.kda.gate_rank == 16
    assert config.moe.shared_size == 64
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (253, 254, 255)
    assert config.dtype == "float32"


def test_kimi_linear_has_no_latent_no_gate_bound_and_plain_residuals():
    config = load_config(GOLDEN / "kimi-linear-tiny")
    assert config.kda.gate_lower_bound is None
    assert not config.kda.full_rank_gate
    assert config.moe.latent_size is None
    assert config.expert_size == config.hidden_size
    assert config.q_lora_rank is None
    assert config.attn_res_block_size is None
    assert config.attn_res_blocks_at(3, "ffn") == 0


def test_quantisation_is_read():
    config = load_config(GOLDEN / "kimi-k3.1-tiny-mxfp4")
    assert config.quantization.group_size == 32
    assert "lm_head" in config.quantization.ignore


def test_defaults_of_what_is_not_published():
    values = raw(K31)
    del values["text_config"]["mla_lora_norm_eps"]
    del values["text_config"]["dsa_config"]["index_norm_eps"]
    config = config_from_dict(values)
    assert config.mla_lora_norm_eps == 1e-6
    assert config.dsa.norm_eps == config.rms_norm_eps == 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_published_form_reads_back_equal(name):
    config = load_config(GOLDEN / name)
    again = config_from_dict(config.to_published())
    assert again == config
    assert hash(again) == hash(config)
    assert again.digest == config.digest
    assert again.unknown_fields == ()


def test_digest_depends_on_each_deciding_field():
    base = config_from_dict(raw(K31))
    assert len(base.digest) == 64
    values = raw(K31)
    values["text_config"]["mla_lora_norm_eps"] = 1e-5
    assert config_from_dict(values).digest != base.digest
    values = raw(K31)
    values["text_config"]["transformers_version"] = "9"
    assert config_from_dict(values).digest == base.digest


def test_bare_text_config_is_recognised_by_its_features():
    for name, family in (("kimi-k3.1-tiny", "kimi_k3.1"), ("kimi-k3-tiny", "kimi_k3")):
        text = raw(name)["text_config"]
        text["dtype"] = "float32"
        config = config_from_dict(text)
        assert config.family == family
        assert config == config_from_dict(raw(name))


def test_dsa_config_and_quantization_may_be_at_the_top_level():
    values = raw("kimi-k3.1-tiny-mxfp4")
    for field in ("dsa_config", "quantization_config"):
        values[field] = values["text_config"].pop(field)
    assert config_from_dict(values) == config_from_dict(raw("kimi-k3.1-tiny-mxfp4"))


def test_dsa_config_by_other_names():
    values = raw(K31)
    values["text_config"]["dsa_config"] = {
        "num_heads": 16,
        "head_dim": 16,
        "index_top_k": 8,
        "full_attn_layers": [4, 8],
    }
    assert config_from_dict(values) == config_from_dict(raw(K31))
    values["text_config"]["dsa_config"]["index_topk"] = 9
    assert "'index_topk' is 9" in refusal(values).message


def test_unknown_fields_are_named_and_harmless_ones_are_not():
    values = raw(K31)
    values["vision_config"] = {"depth": 2}
    values["novel"] = 1
    values["text_config"]["head_dim"] = 72
    values["text_config"]["linear_attn_config"]["twist"] = True
    config = config_from_dict(values)
    assert config.unknown_fields == ("novel", "text_config.linear_attn_config.twist")
    assert config.raw["novel"] == 1


def test_layer_kinds_of_the_last_two_k3_layers():
    config = preset("kimi-k3")
    assert config.full_attention_layers[-2:] == (91, 92)
    assert len(config.full_attention_layers) == 24


def test_attn_res_blocks_of_93_layers():
    config = preset("kimi-k3.1-pro")
    for layer in range(93):
        assert config.attn_res_blocks_at(layer, "attention") == math.ceil(layer / 12)
        assert config.attn_res_blocks_at(layer, "ffn") == layer // 12 + 1
    assert config.attn_res_blocks_at(92, "output") == 8


def test_moe_layer_frequency():
    values = raw(K31)
    values["text_config"] |= {"moe_layer_freq": 2, "first_k_dense_replace": 3}
    assert config_from_dict(values).moe_layers == (4, 6)


def test_several_end_of_sequence_ids():
    values = raw(K31)
    values["text_config"]["eos_token_id"] = [254, 7]
    config = config_from_dict(values)
    assert (config.eos_token_id, config.eos_token_ids) == (254, (254, 7))
    assert config_from_dict(config.to_published()) == config


# A change of the K3.1 golden's text_config, and what the refusal must name.
BROKEN = [
    ({"hidden_size": None}, "'text_config.hidden_size' is null"),
    ({"hidden_size": -64}, "'text_config.hidden_size' is -64"),
    ({"hidden_size": 64.0}, "'text_config.hidden_size' is a number (64.0)"),
    ({"hidden_size": True}, "'text_config.hidden_size' is a boolean"),
    ({"hidden_size": 10**20}, "'text_config.hidden_size' is above 2147483647"),
    ({"rms_norm_eps": 10**400}, "'text_config.rms_norm_eps' is 1000"),
    ({"rms_norm_eps": math.inf}, "'text_config.rms_norm_eps' is inf"),
    ({"rms_norm_eps": 0}, "'text_config.rms_norm_eps' is 0.0"),
    ({"rms_norm_eps": "1e-5"}, "'text_config.rms_norm_eps' is a string"),
    ({"num_hidden_layers": 9}, "do not partition the layers 1..9 (layer 9 is in neither)"),
    ({"num_hidden_layers": 2**31 - 1}, "do not partition the layers"),
    (
        {"num_experts_per_token": 9},
        "'text_config.num_experts_per_token' is 9, but there are only 8",
    ),
    ({"hidden_act": "gelu"}, "'text_config.hidden_act' is 'gelu'"),
    ({"topk_group": 2}, "'text_config.topk_group' is 2; only 1 is supported"),
    ({"num_expert_group": 8}, "'text_config.num_expert_group' is 8"),
    ({"mla_use_nope": False}, "'text_config.mla_use_nope' is False"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"num_key_value_heads": 2}, "'text_config.num_key_value_heads' is 2"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    ({"topk_method": "greedy"}, "topk_method"),
    ({"q_lora_rank": None}, "'text_config.q_lora_rank' is null or missing, but the indexer"),
    ({"eos_token_id": 256}, "'text_config.eos_token_id' is 256"),
    ({"attn_res_block_size": 0}, "'text_config.attn_res_block_size' is 0"),
    ({"linear_attn_config": []}, "'text_config.linear_attn_config' is a list"),
    ({"layer_types": ["full_attention"] * 8}, "'text_config.layer_types' is"),
    ({"qk_head_dim": 23}, "'text_config.qk_head_dim' is 23, which contradicts"),
    ({"rope_scaling": {"type": "yarn"}}, "'text_config.rope_scaling'"),
    ({"n_routed_experts": 7}, "'text_config.n_routed_experts' is 7, but its other name"),
    ({"dtype": "float16"}, "the top level says 'float32'"),
]


@pytest.mark.parametrize(("change", "text"), BROKEN, ids=[str(c)[:40] for c, _ in BROKEN])
def test_refusals_in_the_text_config(change, text):
    values = raw(K31)
    values["text_config"] |= change
    assert text in refusal(values).message


BROKEN_LINEAR = [
    ({"kda_layers": [1, 2, 3, 4, 5, 6, 7]}, "do not partition the layers 1..8"),
    ({"kda_layers": [1, 2, 3, 5, 6, 6]}, "(layer 6 is listed twice)"),
    ({"kda_layers": [0, 2, 3, 5, 6, 7]}, "(layer 0 does not exist)"),
    ({"kda_layers": [1, 2, 3, 5, 6, "7"]}, "'text_config.linear_attn_config.kda_layers' holds"),
    ({"gate_lower_bound": 5.0}, "'text_config.linear_attn_config.gate_lower_bound' is 5.0"),
    ({"gate_lower_bound": None}, "gate_lower_bound' is null"),
    ({"short_conv_kernel_size": 1}, "short_conv_kernel_size' is 1"),
    ({"use_full_rank_gate": 1}, "use_full_rank_gate' is an integer"),
]


@pytest.mark.parametrize(("change", "text"), BROKEN_LINEAR, ids=[str(c) for c, _ in BROKEN_LINEAR])
def test_refusals_in_the_linear_attention_config(change, text):
    values = raw(K31)
    values["text_config"]["linear_attn_config"] |= change
    assert text in refusal(values).message


REQUIRED = [
    "hidden_size",
    "vocab_size",
    "linear_attn_config",
    "routed_expert_hidden_size",
    "attn_res_block_size",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "mla_use_output_gate",
    "num_experts",
    "routed_scaling_factor",
]


@pytest.mark.parametrize("field", REQUIRED)
def test_missing_fields(field):
    values = raw(K31)
    del values["text_config"][field]
    error = refusal(values)
    assert f"field 'text_config.{field}' is missing" in error.message
    assert "add it" in error.remedy


def test_k31_without_dsa_config():
    values = raw(K31)
    del values["text_config"]["dsa_config"]
    assert "'text_config.dsa_config' is missing" in refusal(values).message


def test_k3_with_dsa_config():
    values = raw(K31)
    values["architectures"] = ["KimiK3ForConditionalGeneration"]
    assert "has no sparse attention" in refusal(values).message


def test_dsa_layers_other_than_full_attention_layers():
    values = raw(K31)
    values["text_config"]["dsa_config"]["dsa_layers"] = [4]
    error = refusal(values)
    assert "dsa_layers' is [4], but linear_attn_config.full_attn_layers is [4, 8]" in error.message


def test_two_places_that_differ():
    values = raw(K31)
    values["dsa_config"] = {**values["text_config"]["dsa_config"], "index_topk": 9}
    assert "but the top level says" in refusal(values).message


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("quant_method",), "fp8", "quant_method' is 'fp8'"),
        (("format",), "nvfp4-pack-quantized", "format' is 'nvfp4-pack-quantized'"),
        (("config_groups", "group_0", "weights", "group_size"), 16, "group_size' is 16"),
        (("config_groups", "group_0", "weights", "num_bits"), 8, "num_bits' is 8"),
        (("config_groups", "group_0", "weights"), None, "weights' is null"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "weight-only"),
    ],
)
def test_quantisation_formats_that_are_not_supported(path, value, text):
    values = raw("kimi-k3.1-tiny-mxfp4")
    target = values["text_config"]["quantization_config"]
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    error = refusal(values)
    assert text in str(error)


def test_mxfp4_groups_must_divide_the_expert():
    values = raw("kimi-k3.1-tiny-mxfp4")
    values["text_config"]["moe_intermediate_size"] = 48
    assert "MXFP4 groups of 32 do not divide" in refusal(values).message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'architectures' is ['LlamaForCausalLM']"),
        ({"architectures": "KimiLinear"}, "'architectures' is a string"),
        ({"architectures": [], "model_type": "llama"}, "'model_type' is 'llama'"),
        ({"architectures": [], "model_type": None}, "'architectures' is missing"),
    ],
)
def test_other_models(change, text):
    assert text in refusal(raw("kimi-linear-tiny") | change).message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "holds a list, not an object"),
        (b"\xff\xfe", "is not UTF-8"),
        (b'{"a": 1, "a": 2}', "field 'a' is given twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_files_that_are_no_config(content, text, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config") as caught:
        load_config(tmp_path)
    assert text in caught.value.message


def test_folder_without_a_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read") as caught:
        load_config(tmp_path)
    assert "give a checkpoint folder" in caught.value.remedy


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in parsed JSON."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else ()
    children = enumerate(value) if isinstance(value, list) else children
    for key, child in children:
        yield from places(child, (*path, key))


RAWS = {name: raw(name) for name in NAMES}
PLACES = [(name, path) for name in NAMES for path in places(RAWS[name])]
JSON_VALUES = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1,
        7,
        10**20,
        0.5,
        -0.5,
        "",
        "x",
        [],
        {},
        [1],
        ["x"],
        [None],
        {"a": 1},
    ]
)


@given(st.sampled_from(PLACES), JSON_VALUES)
def test_any_change_gives_a_config_or_a_refusal(place, value):
    name, path = place
    values = copy.deepcopy(RAWS[name])
    target = values
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    try:
        config = config_from_dict(values)
    except CheckpointError:
        refusal(values)
    else:
        assert config_from_dict(config.to_published()) == config


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_read_without_complaint(name):
    assert preset(name).unknown_fields == ()
