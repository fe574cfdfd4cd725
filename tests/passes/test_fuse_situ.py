"""SiTU in several spellings, with and without a bound on the linear half."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridge.passes.fuse_situ import FuseSitu
from plain_maths import apply, calls, evaluate, export


class Situ(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.form == "unbounded":
            return torch.sigmoid(gate) * (4.0 * torch.tanh(gate / 4.0)) * up
        bounded = 25.0 * (up / 25.0).tanh()
        if self.form == "scaled":
            return 4.0 * (gate * 0.25).tanh() * (bounded * gate.sigmoid())
        inner = 4.0 * torch.tanh(gate / 4.0)
        if self.form == "bounded sigmoid":
            return inner * torch.sigmoid(inner) * bounded
        result = inner * torch.sigmoid(gate) * bounded
        return result + inner if self.form == "shared" else result


INPUTS = {"gate": torch.randn(5, 6), "up": torch.randn(5, 6)}


@pytest.mark.parametrize("form", ["plain", "scaled", "unbounded"])
def test_fuses_every_spelling(form: str) -> None:
    gm = export(Situ(form), "prefill", INPUTS)
    before = evaluate(gm, INPUTS)
    assert not apply(FuseSitu(), gm, "prefill").refusals
    assert calls(gm) == ["situ"]
    (node,) = [each for each in gm.graph.nodes if "situ" in str(each.target)]
    assert node.kwargs == {"beta": 4.0, "linear_beta": None if form == "unbounded" else 25.0}
    torch.testing.assert_close(evaluate(gm, INPUTS)[0], before[0])
    assert not apply(FuseSitu(), gm, "prefill").modified


def test_a_factor_that_is_used_elsewhere_is_left_alone() -> None:
    gm = export(Situ("shared"), "prefill", INPUTS)
    (refusal,) = apply(FuseSitu(), gm, "prefill").refusals
    assert refusal.rule == "shared intermediate"


def test_a_sigmoid_of_the_bounded_gate_is_another_activation() -> None:
    gm = export(Situ("bounded sigmoid"), "prefill", INPUTS)
    assert not apply(FuseSitu(), gm, "prefill").matches
    assert calls(gm) == []
