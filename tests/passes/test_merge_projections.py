"""Prefill projects a KDA layer's input once, by decode's weight."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ir.effects import op_name
from hybridge.passes.fuse_kda import FuseKda
from hybridge.passes.merge_projections import MergeProjections
from kda_graphs import PlainKda, inputs_of
from plain_maths import apply, evaluate, export


def fused(phase: str, inputs: dict[str, Tensor], **options: str) -> torch.fx.GraphModule:
    gm = export(PlainKda(phase, **options), phase, inputs)
    apply(FuseKda(), gm, phase)
    return gm


def test_six_products_become_one_by_the_weight_of_decode() -> None:
    inputs = inputs_of("prefill")
    gm, decode = fused("prefill", inputs), fused("decode", inputs_of("decode"))
    before = evaluate(gm, inputs)
    products = sum(op_name(node) == "aten::matmul" for node in gm.graph.nodes)
    result = apply(MergeProjections(), gm, "prefill")
    assert len(result.matches) == 1
    assert gm.meta["derived_weights"] == decode.meta["derived_weights"]
    left = [op_name(node) for node in gm.graph.nodes]
    assert left.count("aten::matmul") == products - 6
    assert left.count("aten::linear") == 1
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    assert not apply(MergeProjections(), gm, "prefill").modified


def test_a_further_projection_of_the_input_is_refused() -> None:
    gm = fused("prefill", inputs_of("prefill"), mistake="seventh projection")
    (refusal,) = apply(MergeProjections(), gm, "prefill").refusals
    assert refusal.rule == "one output gate"


def test_decode_has_nothing_to_merge() -> None:
    gm = fused("decode", inputs_of("decode"))
    result = apply(MergeProjections(), gm, "decode")
    assert not result.matches
    assert not result.refusals
