"""Every vocabulary op, lowered for both SoCs and run by the npu references, equals its reference."""

import pytest
import torch

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.models.caches import CacheShape

from .cases import make_case

SOCS = ["ascend-a3", "ascend-950"]
OPS = torch.ops.hybridge
LATENT = CacheShape("latent_cache_0", 0, "latent", (1, 576))
INDEXER = CacheShape("indexer_cache_0", 0, "indexer", (1, 128))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(left, right, tolerance=1e-4):
    torch.testing.assert_close(left.double(), right.double(), rtol=tolerance, atol=tolerance)


def valid_tokens(case):
    return int(case.values["query_start"][-1])


def check(case, soc, tokens=None, tolerance=1e-4):
    lowered = case.lower(soc)
    expected, expected_caches = case.eager()
    actual, actual_caches = case.run(lowered)
    tokens = valid_tokens(case) if tokens is None else tokens
    close(actual[:tokens], expected[:tokens], tolerance)
    for name, value in expected_caches.items():
        close(actual_caches[name], value, tolerance)
    return lowered


def dsa_case(decode, heads=6, top_k=8):
    tokens = 4 if decode else 8

    def function(query, key, row, weights, indexer_query, latent_cache_0, indexer_cache_0, **batch):
        where = batch["query_start"], batch["context_len"], batch["block_table"]
        OPS.paged_write(indexer_cache_0, key, batch["slot_mapping"])
        OPS.paged_write(latent_cache_0, row, batch["slot_mapping"])
        chosen = OPS.lightning_indexer(indexer_query, weights, indexer_cache_0, *where, top_k=top_k)
        return OPS.sparse_flash_attention(
            query, latent_cache_0, chosen, *where, scale=0.07, value_dim=512
        )

    values = {
        "latent_cache_0": torch.randn(5, 16, 1, 576),
        "indexer_cache_0": torch.randn(5, 16, 1, 128),
        "query": torch.randn(tokens, heads, 576),
        "key": torch.randn(tokens, 1, 128),
        "row": torch.randn(tokens, 1, 576),
        "weights": torch.randn(tokens, 8),
        "indexer_query": torch.randn(tokens, 8, 128),
    }
    return make_case(function, values, (LATENT, INDEXER), decode)


def inactive_rows(case):
    return case.values["slot_mapping"] < 0


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("decode", [False, True])
def test_indexer_and_sparse_attention_over_paged_caches(soc, decode):
    case = dsa_case(decode)
    # Heads are filled up from 6 to 8 and dropped again; two padded columns change nothing.
    lowered = check(case, soc, tokens=2 if decode else None)
    assert lowered.sites["lightning_indexer"] == ("npu_lightning_indexer",)
    assert lowered.sites["sparse_flash_attention"] == ("npu_sparse_flash_attention",)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("decode", [False, True])
def test_dense_attention(soc, decode):
    tokens = 4 if decode else 8

    def function(query, row, latent_cache_0, **batch):
        where = batch["query_start"], batch["context_len"], batch["block_table"]
        OPS.paged_write(latent_cache_0, row, batch["slot_mapping"])
        return OPS.mla_attention(query, latent_cache_0, *where, scale=0.07, value_dim=512)

    values = {
        "latent_cache_0": torch.randn(5, 16, 1, 576),
        "query": torch.randn(tokens, 8, 576),
        "row": torch.randn(tokens, 1, 576),
    }
    case = make_case(function, values, (LATENT,), decode)
    check(case, soc, tokens=2 if decode else None)


KDA_CACHES = (
    CacheShape("kda_state_0", 0, "kda_state", (2, 16, 16)),
    CacheShape("conv_state_0", 0, "conv_state", (96, 3)),
)


def kda_states():
    return {"kda_state_0": torch.randn(3, 2, 16, 16), "conv_state_0": torch.randn(3, 96, 3)}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda_prefill(soc, lower_bound):
    def function(qkv, gate, beta, conv_weight, a_log, dt_bias, kda_state_0, conv_state_0, **batch):
        return OPS.kda_prefill(
            *(qkv, gate, beta, conv_weight, a_log, dt_bias, conv_state_0, kda_state_0),
            *(batch["query_start"], batch["context_len"], batch["state_slot"]),
            lower_bound=lower_bound,
        )

    values = {
        **kda_states(),
        "qkv": torch.randn(8, 96),
        "gate": torch.randn(8, 32),
        "beta": torch.randn(8, 2),
        "conv_weight": torch.randn(96, 4),
        "a_log": torch.randn(2),
        "dt_bias": torch.randn(32),
    }
    lowered = check(make_case(function, values, KDA_CACHES), soc)
    convolution = "CausalConv1d" if soc == "ascend-950" else "gathers"
    assert lowered.sites["kda_prefill"] == (f"{convolution} + ChunkKdaFwd",)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("low_rank_gate", [False, True])
def test_kda_decode(soc, low_rank_gate):
    def function(x, kda_state_0, conv_state_0, g_b=None, **rest):
        weights = {name: rest.pop(name) for name in WEIGHTS}
        return OPS.kda_decode(
            *(x, weights["in_weight"], weights["f_b"], g_b, weights["conv_weight"]),
            *(weights["a_log"], weights["dt_bias"], weights["norm"], weights["o_weight"]),
            *(conv_state_0, kda_state_0, rest["context_len"], rest["state_slot"]),
            lower_bound=-5.0,
            norm_eps=1e-5,
        )

    rank, gate_rows = 8, 8 if low_rank_gate else 32
    values = {
        **kda_states(),
        "x": torch.randn(4, 24),
        "in_weight": torch.randn(96 + rank + 2 + gate_rows, 24) / 5,
        "f_b": torch.randn(32, rank),
        "conv_weight": torch.randn(96, 4),
        "a_log": torch.randn(2),
        "dt_bias": torch.randn(32),
        "norm": torch.rand(16),
        "o_weight": torch.randn(24, 32),
    }
    if low_rank_gate:
        values["g_b"] = torch.randn(32, rank)
    case = make_case(function, values, KDA_CACHES, decode=True)
    lowered = check(case, soc, tokens=2)
    (weight,) = [each for each in lowered.weights if each.name == "a_log"]
    assert [step[0] for step in weight.steps] == ["aten.exp.default"]


WEIGHTS = ("in_weight", "f_b", "conv_weight", "a_log", "dt_bias", "norm", "o_weight")


@pytest.mark.parametrize("soc", SOCS)
def test_attention_residuals(soc):
    def function(sources, queries, prefix, **_):
        numerator, top, total = OPS.attn_res_prepare(sources, queries, eps=1e-5)
        return OPS.attn_res_update(prefix, queries[1], numerator[1], top[1], total[1], eps=1e-5)

    values = {
        "sources": torch.randn(3, 8, 32),
        "queries": torch.randn(4, 32),
        "prefix": torch.randn(8, 32),
    }
    lowered = check(make_case(function, values), soc, tokens=8)
    if soc == "ascend-950":
        assert lowered.sites["attn_res_prepare"] == ("BlockAttnResPrepare",)
        assert lowered.sites["attn_res_update"] == ("BlockAttnResUpdate",)


def moe_case(activation, mxfp4=False, renormalize=True):
    def function(x, hidden, gate, bias, **rest):
        ids, weights = OPS.moe_route(
            hidden, gate, bias, top_k=3, renormalize=renormalize, scale=1.5
        )
        attributes = {"activation": activation, "beta": 4.0, "linear_beta": 25.0}
        if mxfp4:
            packed = (rest["up"], rest["up_scale"], rest["down"], rest["down_scale"])
            return OPS.moe_experts_mxfp4(x, ids, weights, *packed, **attributes)
        return OPS.moe_experts(x, ids, weights, rest["up"], rest["down"], **attributes)

    values = {
        "x": torch.randn(8, 128),
        "hidden": torch.randn(8, 24),
        "gate": torch.randn(6, 24),
        "bias": torch.randn(6),
    }
    if mxfp4:
        values["up"] = torch.randint(0, 256, (6, 256, 64), dtype=torch.uint8)
        values["up_scale"] = torch.randint(118, 122, (6, 256, 4), dtype=torch.uint8)
        values["down"] = torch.randint(0, 256, (6, 128, 64), dtype=torch.uint8)
        values["down_scale"] = torch.randint(118, 122, (6, 128, 4), dtype=torch.uint8)
    else:
        values["up"] = torch.randn(6, 256, 128) / 11
        values["down"] = torch.randn(6, 128, 128) / 11
    return make_case(function, values)


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("activation", ["situ", "silu"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts(soc, activation, renormalize):
    check(moe_case(activation, renormalize=renormalize), soc, tokens=8)


def test_mxfp4_experts_are_decoded_where_there_is_no_fp4():
    lowered = check(moe_case("situ", mxfp4=True), "ascend-a3", tokens=8)
    assert {w.name for w in lowered.weights if w.scale_source} == {"up", "down"}
    assert "up_scale" not in {w.name for w in lowered.weights}


def test_mxfp4_experts_take_mxfp8_rows_on_950():
    lowered = check(moe_case("situ", mxfp4=True), "ascend-950", tokens=8, tolerance=0.1)
    assert "MXFP8 x MXFP4" in lowered.sites["moe_experts_mxfp4"][0]


@pytest.mark.parametrize("soc", SOCS)
def test_norm_linear_and_situ(soc):
    def function(x, weight, up, **_):
        normed = OPS.rms_norm(x, weight, eps=1e-5)
        wide = OPS.linear(normed, up)
        return OPS.situ(*wide.chunk(2, -1), beta=4.0, linear_beta=None)

    values = {"x": torch.randn(8, 32), "weight": torch.rand(32), "up": torch.randn(64, 32)}
    check(make_case(function, values), soc, tokens=8)


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
    case = dsa_case(decode=True)
    before = case.values["indexer_cache_0"]
    _, after = case.run(case.lower("ascend-950"))
    touched = (after["indexer_cache_0"] != before).flatten(2).any(-1)
    assert touched.sum() == 3
    assert not touched[2].any()


def test_a_decode_bucket_has_one_token_a_sequence():
    case = dsa_case(decode=False)
    case.phase = "decode"
    with pytest.raises(UsageError, match="one token a sequence"):
        case.lower("ascend-950")
