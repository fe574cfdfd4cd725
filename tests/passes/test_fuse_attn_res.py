"""Attention Residuals in two stages: batches across sites, frozen sources, near misses, values."""

from __future__ import annotations

import pytest
import torch

from hybridge.ir.derived import materialise
from hybridge.passes.fuse_attn_res import FuseAttnRes
from plain_maths import PlainMix, apply, calls, evaluate, export, mix_inputs


@pytest.mark.parametrize("form", ["stack", "cat"])
def test_sites_with_the_same_frozen_sources_share_stage_one(form: str) -> None:
    inputs = mix_inputs()
    gm = export(PlainMix(form=form), "prefill", inputs)
    before = evaluate(gm, inputs)
    result = apply(FuseAttnRes(), gm, "prefill")
    assert len(result.matches) == 2
    assert calls(gm) == ["attn_res_prepare", "attn_res_update", "attn_res_update"]
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


def test_norm_and_query_become_one_derived_weight() -> None:
    module = PlainMix()
    gm = export(module, "prefill", mix_inputs())
    apply(FuseAttnRes(), gm, "prefill")
    recipes = gm.meta["derived_weights"]
    batch = next(name for name, recipe in recipes.items() if recipe["transform"] == "stack")
    value = materialise(batch, recipes, gm.meta["values"].__getitem__)
    sites = ("first", "second")
    expected = torch.stack([(module.norms[s] * module.queries[s]).flatten() for s in sites])
    torch.testing.assert_close(value, expected)


def test_a_second_run_changes_nothing() -> None:
    gm = export(PlainMix(), "prefill", mix_inputs())
    apply(FuseAttnRes(), gm, "prefill")
    assert not apply(FuseAttnRes(), gm, "prefill").modified


@pytest.mark.parametrize(
    ("mistake", "rule"),
    [
        ("eps outside", "eps is inside the root of the mean square"),
        ("normed values", "h is sum_i softmax_i(query . rms_norm(v_i)) v_i, the values raw"),
        ("shared softmax", "shared intermediate"),
    ],
)
def test_refuses_a_near_miss(mistake: str, rule: str) -> None:
    result = apply(
        FuseAttnRes(), export(PlainMix(mistake=mistake), "prefill", mix_inputs()), "prefill"
    )
    assert not result.matches
    assert {refusal.rule for refusal in result.refusals} == {rule}


def test_refuses_a_site_whose_source_is_written_after_stage_one() -> None:
    inputs = mix_inputs()
    gm = export(PlainMix(mistake="written source"), "prefill", inputs)
    before = evaluate(gm, inputs)
    result = apply(FuseAttnRes(), gm, "prefill")
    (refusal,) = result.refusals
    assert refusal.rule == "write between"
    assert "mul_" in refusal.reason
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
