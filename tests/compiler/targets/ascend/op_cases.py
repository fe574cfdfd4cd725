"""One case an op (or chain of ops) of the vocabulary, with legal dimensions."""

from __future__ import annotations

import torch

from hybridge.models.caches import CacheShape

from .cases import make_case

OPS = torch.ops.hybridge
LATENT = CacheShape("latent_cache_0", 0, "latent", (1, 576))
INDEXER = CacheShape("indexer_cache_0", 0, "indexer", (1, 128))


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


def dense_case(decode):
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
    return make_case(function, values, (LATENT,), decode)


def prolog_case(decode=True, heads=3, hidden=1024, change=lambda name, value: value):
    """The projections of an MLA layer up to its attention; `change` may alter any value in it."""
    tokens, rank, plain, rope, latent = 4 if decode else 8, 1536, 128, 64, 512
    aten = torch.ops.aten

    def function(x, q_a, q_norm, q_b, kv_a, kv_norm, kv_b, latent_cache_0, **batch):
        where = batch["query_start"], batch["context_len"], batch["block_table"]
        low = OPS.rms_norm(aten.linear(x, q_a), q_norm, eps=1e-6)
        query = aten.linear(low, q_b).unflatten(-1, (heads, -1))
        own, key_rope = aten.split_with_sizes(aten.linear(x, kv_a), (latent, rope), -1)
        row = torch.cat([change("key", OPS.rms_norm(own, kv_norm, eps=1e-5)), key_rope], -1)
        OPS.paged_write(latent_cache_0, row.unsqueeze(1), batch["slot_mapping"])
        up, _ = aten.split_with_sizes(kv_b.unflatten(0, (heads, -1)), (plain, 64), 1)
        query_plain, query_rope = aten.split_with_sizes(query, (plain, rope), -1)
        absorbed = change("absorbed", aten.einsum("thn,hnc->thc", [query_plain, up]))
        full = torch.cat([absorbed, change("rope", query_rope)], -1)
        mixed = OPS.mla_attention(full, latent_cache_0, *where, scale=0.07, value_dim=latent)
        return mixed.flatten(1).sum(-1, keepdim=True) + low

    values = {
        "latent_cache_0": torch.randn(5, 16, 1, latent + rope),
        "x": torch.randn(tokens, hidden),
        "q_a": torch.randn(rank, hidden) / hidden**0.5,
        "q_norm": torch.rand(rank) + 0.5,
        "q_b": torch.randn(heads * (plain + rope), rank) / rank**0.5,
        "kv_a": torch.randn(latent + rope, hidden) / hidden**0.5,
        "kv_norm": torch.rand(latent) + 0.5,
        "kv_b": torch.randn(heads * (plain + 64), latent) / plain**0.5,
    }
    return make_case(function, values, (LATENT,), decode, whole=True)


KDA_CACHES = (
    CacheShape("kda_state_0", 0, "kda_state", (2, 16, 16)),
    CacheShape("conv_state_0", 0, "conv_state", (96, 3)),
)


def kda_states():
    return {"kda_state_0": torch.randn(3, 2, 16, 16), "conv_state_0": torch.randn(3, 96, 3)}


def kda_prefill_case(lower_bound):
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
    return make_case(function, values, KDA_CACHES)


_WEIGHTS = ("in_weight", "f_b", "conv_weight", "a_log", "dt_bias", "norm", "o_weight")


def kda_decode_case(low_rank_gate):
    def function(x, kda_state_0, conv_state_0, g_b=None, **rest):
        weights = {name: rest.pop(name) for name in _WEIGHTS}
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
    return make_case(function, values, KDA_CACHES, decode=True)


def attn_res_case():
    """A restart, two sites that add, and the output's site; the second prefix is read again."""

    def function(sources, queries, weight, prefix, first, second, **_):
        statistics = OPS.attn_res_prepare(sources, queries, eps=1e-5)

        def site(place):
            return {"site": place, "eps": 1e-5}

        def add(prefix, delta, place):
            given = (prefix, delta, queries[place], *statistics, weight)
            return OPS.attn_res_add_update_norm(*given, **site(place), norm_eps=1e-3)

        restart = OPS.attn_res_update_norm(
            prefix, queries[0], *statistics, weight, **site(0), norm_eps=1e-3
        )
        prefix, one = add(prefix, first, 1)
        total, two = add(prefix, second, 2)
        output = OPS.attn_res_update(total, queries[3], *statistics, **site(3))
        return restart + one + two + output + prefix

    values = {
        "sources": torch.randn(3, 8, 32),
        "queries": torch.randn(4, 32),
        "weight": torch.randn(32),
        **{name: torch.randn(8, 32) for name in ("prefix", "first", "second")},
    }
    return make_case(function, values)


def moe_case(activation, mxfp4=False, renormalize=True, width=128, decode=False):
    tokens = 4 if decode else 8

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
        "x": torch.randn(tokens, width),
        "hidden": torch.randn(tokens, 24),
        "gate": torch.randn(6, 24),
        "bias": torch.randn(6),
    }
    if mxfp4:
        values["up"] = torch.randint(0, 256, (6, 256, width // 2), dtype=torch.uint8)
        values["up_scale"] = torch.randint(118, 122, (6, 256, width // 32), dtype=torch.uint8)
        values["down"] = torch.randint(0, 256, (6, width, 64), dtype=torch.uint8)
        values["down_scale"] = torch.randint(118, 122, (6, width, 4), dtype=torch.uint8)
    else:
        values["up"] = torch.randn(6, 256, width) / width**0.5
        values["down"] = torch.randn(6, width, 128) / 11
    return make_case(function, values, decode=decode)
