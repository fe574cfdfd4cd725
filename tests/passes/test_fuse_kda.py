"""FlashKDA and MegaKDA: other spellings, states, near misses, hazards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from hybridge.ir.signature import PHASES
from hybridge.passes.fuse_kda import FuseKda
from kda_graphs import RANK, D, H, P, PlainKda, ThreeStates, inputs_of, three_state_inputs
from plain_maths import apply, batch, calls, evaluate, export


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_fuses_the_same_maths_written_differently(phase: str, bounded: bool) -> None:
    inputs = inputs_of(phase)
    gm = export(PlainKda(phase, bounded=bounded), phase, inputs)
    before = evaluate(gm, inputs)
    result = apply(FuseKda(), gm, phase)
    assert not result.refusals
    assert calls(gm) == [f"kda_{phase}"]
    (node,) = [each for each in gm.graph.nodes if f"kda_{phase}" in str(each.target)]
    assert node.kwargs["lower_bound"] == (-5.0 if bounded else None)
    rows = batch(phase).real_tokens
    after = evaluate(gm, inputs)
    torch.testing.assert_close(after[0][:rows], before[0][:rows], rtol=1e-4, atol=1e-4)
    for old, new in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    assert not apply(FuseKda(), gm, phase).modified


def fused_like_eager(phase: str, **options: Any) -> GraphModule:
    """The graph after the fusion, which must have happened and must compute what it did."""
    inputs = inputs_of(phase)
    gm = export(PlainKda(phase, **options), phase, inputs)
    before = evaluate(gm, inputs)
    result = apply(FuseKda(), gm, phase)
    assert not result.refusals, result.refusals
    assert calls(gm) == [f"kda_{phase}"]
    rows = batch(phase).real_tokens
    after = evaluate(gm, inputs)
    torch.testing.assert_close(after[0][:rows], before[0][:rows], rtol=1e-4, atol=1e-4)
    for old, new in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    return gm


@pytest.mark.parametrize("form", ["three writes", "conv1d", "conv1d joint"])
@pytest.mark.parametrize("phase", PHASES)
def test_fuses_one_convolution_or_three(phase: str, form: str) -> None:
    gm = fused_like_eager(phase, form=form)
    assert not apply(FuseKda(), gm, phase).modified


def test_three_filters_become_one_weight() -> None:
    recipes = fused_like_eager("decode", form="three").meta["derived_weights"]
    assert recipes["w.conv_q.joined"] == {
        "transform": "concat", "inputs": ["w.conv_q", "w.conv_k", "w.conv_v"], "axis": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spelling", "bounded"), [("exp", True), ("exp", False), ("tanh", False), ("log", False)]
)
@pytest.mark.parametrize("phase", PHASES)
def test_fuses_every_spelling_of_gates_and_norms(phase: str, spelling: str, bounded: bool) -> None:
    fused_like_eager(phase, spelling=spelling, bounded=bounded)


def test_states_apart_are_refused_by_name() -> None:
    gm = export(ThreeStates("decode"), "decode", three_state_inputs("decode"))
    (refusal,) = apply(FuseKda(), gm, "decode").refusals
    assert refusal.rule == "one conv_state"
    assert "q_conv_state and k_conv_state and v_conv_state are 3 inputs" in refusal.reason
    assert "their convolutions may stay separate" in refusal.remedy


def test_decode_joins_the_weights_of_one_input() -> None:
    gm = export(PlainKda("decode"), "decode", inputs_of("decode"))
    apply(FuseKda(), gm, "decode")
    ((name, recipe),) = gm.meta["derived_weights"].items()
    assert recipe["inputs"] == [f"w.{part}" for part in ("q", "k", "v", "f_a", "b", "g_a")]
    (weight,) = [node for node in gm.graph.nodes if node.meta.get("weight") == name]
    assert tuple(weight.meta["val"].shape) == (3 * P + RANK + H + RANK, D)


@pytest.mark.parametrize(
    ("phase", "mistake", "rule"),
    [
        ("decode", "before decay", "delta rule"),
        ("decode", "late start", "first token"),
        ("decode", "l2 eps", "1e-6 is added inside the root of the L2 norms"),
        ("prefill", "l2 eps", "1e-6 is added inside the root of the L2 norms"),
        ("decode", "negative q eps", "1e-6 is added inside the root of the L2 norms"),
        ("decode", "swapped histories", "convolution, norms, gates"),
        ("prefill", "unit value", "convolution, norms, gates"),
        ("decode", "state by index", "rows without a state write none"),
        ("prefill", "state by index", "rows without a state write none"),
        ("prefill", "clamped gate", "gates"),
        ("decode", "silu gate", "convolution, norms, gates"),
        ("decode", "shared core", "shared intermediate"),
        ("decode", "written twice", "write between"),
    ],
)
def test_refuses_a_near_miss(phase: str, mistake: str, rule: str) -> None:
    gm = export(PlainKda(phase, mistake=mistake), phase, inputs_of(phase))
    result = apply(FuseKda(), gm, phase)
    assert not result.matches
    (refusal,) = result.refusals
    assert rule in refusal.rule
    assert f"kda_{phase}" not in calls(gm)


def test_refuses_an_input_that_is_written_after_its_projections() -> None:
    """They lie before the region, and the op reads their input after it."""
    gm = export(PlainKda("decode"), "decode", inputs_of("decode"))
    (x,) = (node for node in gm.graph.nodes if node.name == "x")
    last_write = gm.graph.find_nodes(
        op="call_function", target=torch.ops.hybridge.state_write.default
    )[-1]
    with gm.graph.inserting_before(last_write):
        write = gm.graph.call_function(torch.ops.aten.mul_.Tensor, (x, 0.5))
    write.meta["val"] = x.meta["val"]
    (refusal,) = apply(FuseKda(), gm, "decode").refusals
    assert refusal.rule == "write between"
    assert "writes x between" in refusal.reason


@pytest.mark.parametrize("phase", PHASES)
def test_a_clamped_length_is_another_norm_than_eps_in_the_root(phase: str) -> None:
    """functional.normalize divides by max(length, eps): only tiny vectors tell."""
    gm = export(PlainKda(phase, spelling="normalize"), phase, inputs_of(phase))
    (refusal,) = apply(FuseKda(), gm, phase).refusals
    assert refusal.rule.startswith("1e-6 is added inside the root of the L2 norms")
