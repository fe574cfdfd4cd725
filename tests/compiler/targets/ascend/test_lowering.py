"""Every vocabulary op, lowered for both SoCs and run by the npu references, equals its reference."""

import pytest
import torch

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.models.caches import CacheShape

from . import op_cases as cases
from .cases import make_case

SOCS = ["ascend-a3", "ascend-950"]
OPS = torch.ops.hybridge


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(left, right, tolerance=1e-4):
    torch.testing.assert_close(left.double(), right.double(), rtol=tolerance, atol=tolerance)


def check(case, soc, tokens=None, tolerance=1e-4):
    lowered = case.lower(soc)
    expected, expected_caches = case.eager()
    actual, actual_caches = case.run(lowered)
    tokens = int(case.values["query_start"][-1]) if tokens is None else tokens
    close(actual[:tokens], expected[:tokens], tolerance)
    for name, value in expected_caches.items():
        close(actual_caches[name], value, tolerance)
    return lowered


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("decode", [False, True])
def test_indexer_and_sparse_attention_over_paged_caches(soc, decode):
    # Heads are filled up from 6 to 8 and dropped again; row 2 of the decode batch is inactive.
    lowered = check(cases.dsa_case(decode), soc, tokens=2 if decode else None)
    assert lowered.sites["lightning_indexer"] == ("npu_lightning_indexer",)
    assert lowered.sites["sparse_flash_attention"] == ("npu_sparse_flash_attention",)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("decode", [False, True])
def test_dense_attention(soc, decode):
    check(cases.dense_case(decode), soc, tokens=2 if decode else None)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_prefill(soc, lower_bound):
    lowered = check(cases.kda_prefill_case(lower_bound), soc)
    convolution = "CausalConv1d" if soc == "ascend-950" else "gathers"
    assert lowered.sites["kda_prefill"] == (f"{convolution} + ChunkKdaFwd",)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("low_rank_gate", [False, True])
def test_kda_decode(soc, low_rank_gate):
    lowered = check(cases.kda_decode_case(low_rank_gate), soc, tokens=2)
    (weight,) = [each for each in lowered.weights if each.name == "a_log"]
    assert [step[0] for step in weight.steps] == ["aten.exp.default"]


@pytest.mark.parametrize("soc", SOCS)
def test_attention_residuals(soc):
    lowered = check(cases.attn_res_case(), soc, tokens=8)
    if soc == "ascend-950":
        assert lowered.sites["attn_res_prepare"] == ("BlockAttnResPrepare",)
        assert lowered.sites["attn_res_update"] == ("BlockAttnResUpdate",)
        site = ("BlockAttnResUpdate", "npu_rms_norm")
        assert lowered.sites["attn_res_update_norm"] == site
        assert lowered.sites["attn_res_add_update_norm"] == 2 * site


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts(soc, activation, renormalize):
    check(cases.moe_case(activation, renormalize=renormalize), soc, tokens=8)


def test_mxfp4_experts_are_decoded_where_there_is_no_fp4():
    lowered = check(cases.moe_case("situ", mxfp4=True), "ascend-a3", tokens=8)
    assert {w.name for w in lowered.weights if w.scale_source} == {"up", "down"}
    assert "up_scale" not in {w.name for w in lowered.weights}


def test_mxfp4_experts_take_mxfp8_rows_on_950():
    lowered = check(cases.moe_case("situ", mxfp4=True), "ascend-950", tokens=8, tolerance=0.1)
    assert "MXFP8 x MXFP4" in lowered.sites["moe_experts_mxfp4"][0]


@pytest.mark.parametrize("soc", SOCS)
def test_norm_linear_and_situ(soc):
    def function(x, weight, up, **_):
        normed = OPS.rms_norm(x, weight, eps=1e-5)
        wide = OPS.linear(normed, up)
        return OPS.situ(*wide.chunk(2, -1), beta=4.0, linear_beta=None)

    values = {"x": torch.randn(8, 32), "weight": torch.rand(32), "up": torch.randn(64, 32)}
    check(make_case(function, values), soc, tokens=8)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("swapped", [False, True])
def test_gate_and_up_of_one_product_are_not_joined_again(soc, swapped):
    def function(x, both, **_):
        wide = OPS.linear(x, both)
        halves = [wide[:, :32], wide[:, 32:]]
        gate, up = reversed(halves) if swapped else halves
        return OPS.situ(gate, up, beta=4.0, linear_beta=25.0)

    values = {"x": torch.randn(8, 32), "both": torch.randn(64, 32)}
    lowered = check(make_case(function, values), soc, tokens=8)
    joined = [n for n in lowered.graph_module.graph.nodes if "aten.cat" in str(n.target)]
    assert bool(joined) == swapped  # the other way around they are no gate_up


def test_mega_kda_tells_which_of_its_rules_a_layer_breaks():
    lowered = cases.kda_decode_case(False).lower("ascend-950")
    (result,) = [each for each in lowered.results if each.name == "fuse_mega_kda"]
    (refusal,) = result.refusals
    for broken in (
        "batch is 4, must be 16 to 256, a multiple of 16",
        "tokens a sequence is 1, must be 8",
        "heads is 2, must be 6",
        "hidden size is 24, must be 7168",
        "head dimension is 16, must be 128",
    ):
        assert broken in refusal.reason


@pytest.mark.parametrize("swapped", [(0, 1), (2, 3), (1, 4)])
def test_a_latent_row_written_in_another_order_is_caught(swapped):
    case = cases.dense_case(True)
    lowered = case.lower("ascend-950")
    (write,) = [n for n in lowered.graph_module.graph.nodes if "scatter_pa" in str(n.target)]
    args = list(write.args)
    args[swapped[0]], args[swapped[1]] = args[swapped[1]], args[swapped[0]]
    write.args = tuple(args)
    lowered.graph_module.recompile()
    try:
        actual = case.run(lowered)[0][:2]
    except (RuntimeError, IndexError):
        return
    assert not torch.allclose(actual, case.eager()[0][:2], atol=1e-3)


def test_every_broken_constraint_is_told_at_once():
    def function(query, weights, latent_query, latent_cache_0, indexer_cache_0, **batch):
        where = batch["query_start"], batch["context_len"], batch["block_table"]
        chosen = OPS.lightning_indexer(query, weights, indexer_cache_0, *where, top_k=2500)
        return OPS.sparse_flash_attention(
            latent_query, latent_cache_0, chosen, *where, scale=1.0, value_dim=512
        )

    caches = (
        CacheShape("latent_cache_0", 0, "latent", (1, 544)),
        CacheShape("indexer_cache_0", 0, "indexer", (1, 64)),
    )
    values = {
        "latent_cache_0": torch.randn(5, 16, 1, 544),
        "indexer_cache_0": torch.randn(5, 16, 1, 64),
        "query": torch.randn(8, 7, 64),
        "weights": torch.randn(8, 7),
        "latent_query": torch.randn(8, 8, 544),
    }
    case = make_case(function, values, caches)
    with pytest.raises(CompileError) as error:
        case.lower("ascend-950")
    text = str(error.value)
    assert "head dimension is 64, must be 128" in text
    assert "query heads is 7, must be 8, 16, 24, 32 or 64" in text
    assert "sparse count is 2500, must be 1 to 2048, or 3072" in text
    assert "rope dimension is 32, must be 64" in text


def test_no_state_row_or_cache_row_of_an_inactive_sequence_changes():
    case = cases.dsa_case(decode=True)
    before = case.values["indexer_cache_0"]
    _, after = case.run(case.lower("ascend-950"))
    touched = (after["indexer_cache_0"] != before).flatten(2).any(-1)
    assert touched.sum() == 3
    assert not touched[2].any()


def test_a_decode_bucket_has_one_token_a_sequence():
    case = cases.dsa_case(decode=False)
    case.phase = "decode"
    with pytest.raises(UsageError, match="one token a sequence"):
        case.lower("ascend-950")
