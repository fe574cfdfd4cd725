"""The attention fusions: sparse and dense, near misses, hazards, values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from hybridge.ir.derived import materialise
from hybridge.ir.pass_base import PassResult
from hybridge.ir.signature import PHASES
from hybridge.passes.fuse_sparse_flash_attention import FuseSparseFlashAttention
from plain_maths import (
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    VALUE,
    ExpandedAttention,
    PlainAttention,
    apply,
    attention_inputs,
    batch,
    calls,
    evaluate,
    export,
)


def fuse(phase: str, sparse: bool = True, **options: Any) -> PassResult:
    inputs = attention_inputs(phase, sparse)
    gm = export(PlainAttention(phase, sparse, **options), phase, inputs)
    return apply(FuseSparseFlashAttention(), gm, phase)


@pytest.mark.parametrize("form", ["exp", "softmax", "early"])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_fuses_the_same_maths_written_differently(phase: str, sparse: bool, form: str) -> None:
    inputs = attention_inputs(phase, sparse)
    gm = export(PlainAttention(phase, sparse, form=form), phase, inputs)
    before = evaluate(gm, inputs)
    result = apply(FuseSparseFlashAttention(), gm, phase)
    assert not result.refusals
    assert calls(gm) == ["sparse_flash_attention" if sparse else "mla_attention"]
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


def test_the_scale_is_carried_over() -> None:
    gm = export(PlainAttention("decode"), "decode", attention_inputs("decode"))
    apply(FuseSparseFlashAttention(), gm, "decode")
    (node,) = [n for n in gm.graph.nodes if "sparse_flash" in str(n.target)]
    assert node.kwargs["scale"] == pytest.approx(PlainAttention("decode").scale())
    assert node.kwargs["value_dim"] == LATENT


def test_a_second_run_changes_nothing() -> None:
    gm = export(PlainAttention("prefill"), "prefill", attention_inputs("prefill"))
    apply(FuseSparseFlashAttention(), gm, "prefill")
    assert not apply(FuseSparseFlashAttention(), gm, "prefill").modified


@pytest.mark.parametrize("phase", PHASES)
def test_refuses_a_strict_causal_mask(phase: str) -> None:
    (refusal,) = fuse(phase, sparse=False, mistake="strict mask").refusals
    assert refusal.rule == "a token sees its own position"


@pytest.mark.parametrize(
    ("phase", "mistake"),
    [("prefill", "drops position 0"), ("decode", "no mask"), ("prefill", "dropped value")],
)
def test_refuses_another_selection_or_weighting(phase: str, mistake: str) -> None:
    result = fuse(phase, mistake=mistake)
    assert not result.matches
    assert "the definition" in result.refusals[0].reason


def test_refuses_a_missing_causal_mask() -> None:
    (refusal,) = fuse("prefill", sparse=False, mistake="no mask").refusals
    assert "definition" in refusal.reason


def test_a_softmax_without_scale_has_scale_one() -> None:
    gm = export(PlainAttention("decode", mistake="no scale"), "decode", attention_inputs("decode"))
    assert not apply(FuseSparseFlashAttention(), gm, "decode").refusals
    (node,) = [n for n in gm.graph.nodes if "sparse_flash" in str(n.target)]
    assert node.kwargs["scale"] == 1.0


def test_refuses_a_softmax_that_is_used_elsewhere() -> None:
    (refusal,) = fuse("prefill", mistake="shared softmax").refusals
    assert refusal.rule == "shared intermediate"


@pytest.mark.parametrize("sparse", [True, False])
def test_refuses_a_paged_write_between_read_and_result(sparse: bool) -> None:
    inputs = attention_inputs("prefill", sparse)
    example = batch("prefill")
    inputs["slot_mapping"] = example.inputs()["slot_mapping"]
    inputs["rows_to_write"] = torch.randn(example.tokens, 1, LATENT + ROPE)
    gm = export(PlainAttention("prefill", sparse), "prefill", inputs)
    (refusal,) = apply(FuseSparseFlashAttention(), gm, "prefill").refusals
    assert refusal.rule == "write between"
    assert "paged_write" in refusal.reason
    assert "latent_cache" in refusal.reason
    assert calls(gm) == ["paged_write"]


FORMS = ("one weight", "keys first", "two weights", "parts", "sdpa")


def fuse_expanded(phase: str, sparse: bool, **options: str) -> tuple[PassResult, GraphModule]:
    inputs = attention_inputs(phase, sparse, expanded=True)
    gm = export(ExpandedAttention(phase, sparse, **options), phase, inputs)
    return apply(FuseSparseFlashAttention(), gm, phase), gm


@pytest.mark.parametrize(
    ("phase", "sparse"), [("prefill", True), ("decode", False), ("decode", True)]
)
@pytest.mark.parametrize("form", FORMS)
def test_expanded_keys_and_values_are_absorbed(phase: str, sparse: bool, form: str) -> None:
    inputs = attention_inputs(phase, sparse, expanded=True)
    gm = export(ExpandedAttention(phase, sparse, form), phase, inputs)
    before = evaluate(gm, inputs)
    result = apply(FuseSparseFlashAttention(), gm, phase)
    assert not result.refusals, result.refusals
    assert calls(gm) == ["sparse_flash_attention" if sparse else "mla_attention"]
    (node,) = [each for each in gm.graph.nodes if "attention" in str(each.target)]
    assert node.kwargs["value_dim"] == LATENT
    rows = batch(phase).real_tokens
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new[:rows], old[:rows], rtol=1e-4, atol=1e-5)
    assert not apply(FuseSparseFlashAttention(), gm, phase).modified


def test_the_absorbed_weights_are_derived_with_their_origin() -> None:
    _, gm = fuse_expanded("decode", True)
    recipes, values = gm.meta["derived_weights"], gm.meta["values"]
    assert set(recipes) == {"kv_b.heads", "kv_b.key_up", "kv_b.value_up"}
    heads = values["kv_b"].reshape(HEADS, NOPE + VALUE, LATENT)
    for name, expected in (("key_up", heads[:, :NOPE]), ("value_up", heads[:, NOPE:])):
        made = materialise(f"kv_b.{name}", recipes, values.__getitem__)
        assert torch.equal(made, expected)


@pytest.mark.parametrize(
    ("mistake", "rule"),
    [
        ("squared keys", "out is softmax(scale * query . rows) rows"),
        ("expanded rope", "out is softmax(scale * query . rows) rows"),
        ("shared keys", "shared intermediate"),
    ],
)
def test_refuses_another_expansion(mistake: str, rule: str) -> None:
    result, _ = fuse_expanded("decode", True, mistake=mistake)
    assert not result.matches
    assert [refusal.rule for refusal in result.refusals] == [rule]
