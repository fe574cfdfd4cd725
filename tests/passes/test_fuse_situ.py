"""SiTU in several spellings, with and without a bound on the linear half."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import PassResult
from hybridge.passes.fuse_situ import FuseSitu
from plain_maths import apply, calls, evaluate, export


class Situ(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.form == "unbounded":
            return torch.sigmoid(gate) * (4.0 * torch.tanh(gate / 4.0)) * up
        if self.form == "exp":
            half = up * (2.0 / 25.0)
            linear = 25.0 * (2 / (1 + torch.exp(-half)) - 1)
            return gate.mul(0.25).tanh() * 4.0 / (1 + (-gate).exp()) * linear
        if self.form == "tanh only":
            half = (torch.tanh(gate * 0.5) + 1) * 0.5
            return half * 25.0 * torch.tanh(up / 25.0) * torch.tanh(gate / 4.0) * 4.0
        if self.form == "sigmoid only":
            inner = 4.0 * (2.0 * torch.sigmoid(gate * 0.5) - 1.0)
            return inner * torch.sigmoid(gate) * (50.0 * torch.sigmoid(up * 0.08) - 25.0)
        if self.form.startswith("wide"):
            wide = gate.float()
            result = 4.0 * torch.tanh(wide / 4.0) * torch.sigmoid(wide)
            result = result * (25.0 * torch.tanh(up.float() / 25.0))
            return result.to(gate.dtype) if self.form == "wide inside" else result
        if self.form == "scaled gate":
            gate = gate * 1.5
        bounded = 25.0 * (up / 25.0).tanh()
        if self.form == "scaled":
            return 4.0 * (gate * 0.25).tanh() * (bounded * gate.sigmoid())
        inner = 4.0 * torch.tanh(gate / 4.0)
        if self.form == "bounded sigmoid":
            return inner * torch.sigmoid(inner) * bounded
        result = inner * torch.sigmoid(gate) * bounded
        if self.form == "extra scale":
            result = result * 1.1
        return result + inner if self.form == "shared" else result


INPUTS = {"gate": torch.randn(5, 6), "up": torch.randn(5, 6)}


SPELLINGS = ("plain", "scaled", "unbounded", "exp", "tanh only", "sigmoid only", "scaled gate")


@pytest.mark.parametrize("form", SPELLINGS)
def test_fuses_every_spelling(form: str) -> None:
    gm = export(Situ(form), "prefill", INPUTS)
    before = evaluate(gm, INPUTS)
    assert not apply(FuseSitu(), gm, "prefill").refusals
    assert calls(gm) == ["situ"]
    (node,) = [each for each in gm.graph.nodes if "situ" in str(each.target)]
    assert node.kwargs == {"beta": 4.0, "linear_beta": None if form == "unbounded" else 25.0}
    torch.testing.assert_close(evaluate(gm, INPUTS)[0], before[0], rtol=1e-5, atol=1e-5)
    assert not apply(FuseSitu(), gm, "prefill").modified


def test_a_factor_that_is_used_elsewhere_is_left_alone() -> None:
    gm = export(Situ("shared"), "prefill", INPUTS)
    (refusal,) = apply(FuseSitu(), gm, "prefill").refusals
    assert refusal.rule == "shared intermediate"


def test_an_extra_factor_stays_outside() -> None:
    gm = export(Situ("extra scale"), "prefill", INPUTS)
    before = evaluate(gm, INPUTS)
    assert not apply(FuseSitu(), gm, "prefill").refusals
    assert [op_name(node) for node in gm.graph.nodes][-3:-1] == ["hybridge::situ", "aten::mul"]
    torch.testing.assert_close(evaluate(gm, INPUTS)[0], before[0])


def test_a_sigmoid_of_the_bounded_gate_is_another_activation() -> None:
    gm = export(Situ("bounded sigmoid"), "prefill", INPUTS)
    assert not apply(FuseSitu(), gm, "prefill").matches
    assert calls(gm) == []


def fused(form: str, gate: torch.dtype, up: torch.dtype) -> tuple[PassResult, GraphModule]:
    """What the pass says of halves of these dtypes; the graph keeps its result's dtype and values."""
    inputs = {"gate": INPUTS["gate"].to(gate), "up": INPUTS["up"].to(up)}
    gm = export(Situ(form), "prefill", inputs)
    before = evaluate(gm, inputs)[0]
    result = apply(FuseSitu(), gm, "prefill")
    after = evaluate(gm, inputs)[0]
    assert after.dtype == before.dtype
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    return result, gm


@pytest.mark.parametrize(
    ("form", "gate", "up", "rule"),
    [
        # A bf16 half is rounded after each step, which the op does not do.
        ("plain", torch.bfloat16, torch.float32, "beta tanh(g / beta) sigmoid(g)"),
        ("plain", torch.float32, torch.bfloat16, "beta tanh(g / beta) sigmoid(g)"),
        ("unbounded", torch.float32, torch.bfloat16, "gate and up have one dtype"),
    ],
)
def test_a_half_that_is_promoted_is_left_alone(
    form: str, gate: torch.dtype, up: torch.dtype, rule: str
) -> None:
    result, gm = fused(form, gate, up)
    (refusal,) = result.refusals
    assert refusal.rule.startswith(rule)
    assert calls(gm) == []


@pytest.mark.parametrize("form", ["wide", "wide inside"])
def test_casts_in_front_stay_so_that_both_halves_have_one_dtype(form: str) -> None:
    result, gm = fused(form, torch.bfloat16, torch.bfloat16)
    assert not result.refusals
    (node,) = [each for each in gm.graph.nodes if "situ" in str(each.target)]
    assert [each.meta["val"].dtype for each in node.args] == [torch.float32] * 2
