"""The router's fusion: spellings, ties, the bias, near misses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridge.passes.fuse_moe import FuseMoe
from plain_maths import apply, calls, evaluate, export

EXPERTS, WIDTH, KEPT = 6, 8, 2


class Moe(nn.Module):
    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        self.form = form
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS))
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 4, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "tanh":
            scores = 0.5 + 0.5 * torch.tanh(torch.einsum("td,ed->te", x, self.gate) / 2)
        elif self.form == "softmax":
            scores = torch.softmax(torch.nn.functional.linear(x, self.gate), dim=-1)
        elif self.form == "matmul":
            scores = 1 / (1 + torch.exp(-(x @ self.gate.T)))
        else:
            scores = torch.sigmoid(torch.nn.functional.linear(x, self.gate))
        biased = scores + self.bias
        if self.form == "topk":
            chosen = torch.topk(biased, KEPT).indices
        elif self.form == "ascending":
            chosen = torch.argsort(-biased, stable=True)[:, :KEPT]
        else:
            chosen = torch.argsort(biased, descending=True, stable=True)[:, :KEPT]
        source = biased if self.form == "leak" else scores
        weights = source.gather(1, chosen)
        if self.form == "scaled sum":
            weights = weights * (2.5 / (1e-20 + weights.sum(-1, keepdim=True)))
        elif self.form == "normalised first":
            # Over all experts: another function than over the chosen ones.
            weights = 2.5 * (scores / (scores.sum(-1, keepdim=True) + 1e-20)).gather(1, chosen)
        elif self.form == "no guard":
            weights = 2.5 * (weights / weights.sum(-1, keepdim=True).clamp(min=1e-6))
        else:
            if self.form != "raw":
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = 2.5 * weights
        out: Tensor = torch.ops.hybridge.moe_experts(
            x,
            chosen.int(),
            weights,
            self.gate_up,
            self.down,
            activation="silu",
            beta=4.0,
            linear_beta=None,
        )
        return out + scores.sum() if self.form == "shared" else out


SPELLINGS = ("plain", "matmul", "scaled sum", "ascending", "raw")


@pytest.mark.parametrize("form", SPELLINGS)
def test_fuses_every_spelling(form: str) -> None:
    inputs = {"x": torch.randn(5, WIDTH)}
    gm = export(Moe(form), "prefill", inputs)
    before = evaluate(gm, inputs)
    assert not apply(FuseMoe(), gm, "prefill").refusals
    assert calls(gm) == ["moe_route", "moe_experts"]
    (route,) = [node for node in gm.graph.nodes if "moe_route" in str(node.target)]
    assert route.kwargs == {"top_k": KEPT, "renormalize": form != "raw", "scale": 2.5}
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old)
    assert not apply(FuseMoe(), gm, "prefill").modified


@pytest.mark.parametrize(
    ("form", "rule"),
    [
        ("leak", "experts by descending sigmoid(logit) + bias, weights without bias"),
        ("topk", "undetermined op"),
        ("softmax", "experts by descending sigmoid(logit) + bias, weights without bias"),
        ("normalised first", "experts by descending sigmoid(logit) + bias, weights without bias"),
        # 0.5 + 0.5 tanh(x / 2) is a sigmoid until it rounds to 0, where the order of scores is lost.
        ("tanh", "1e-20 is added to the sum of the weights"),
        ("no guard", "1e-20 is added to the sum of the weights"),
        ("shared", "shared intermediate"),
    ],
)
def test_refuses_a_near_miss(form: str, rule: str) -> None:
    gm = export(Moe(form), "prefill", {"x": torch.randn(5, WIDTH)})
    (refusal,) = apply(FuseMoe(), gm, "prefill").refusals
    assert refusal.rule == rule
    assert calls(gm) == ["moe_experts"]
