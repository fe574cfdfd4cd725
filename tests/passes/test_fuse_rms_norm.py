"""RMS norms in several spellings; dtype promotion and L2 norms are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridge.passes.fuse_rms_norm import FuseRmsNorm
from plain_maths import apply, calls, evaluate, export


class Norm(nn.Module):
    def __init__(self, form: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn(6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "divide":
            return self.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        if self.form == "power":
            return x * (x * x).mean(-1, keepdim=True).add(1e-5).pow(-0.5) * self.weight
        if self.form == "cast":
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            return (normed * self.weight.float()).to(x.dtype)
        if self.form == "whole":
            return torch.nn.functional.rms_norm(x, (6,), self.weight, 1e-5)
        if self.form == "whole, default eps":
            return torch.nn.functional.rms_norm(x, (6,), self.weight)
        if self.form == "einsum":
            mean = torch.einsum("td,td->t", x, x) / 6
            return torch.rsqrt(mean + 1e-5).unsqueeze(1) * (self.weight.view(1, 6) * x)
        if self.form == "length":
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / 6**0.5
            return x / torch.sqrt(length * length + 1e-5) * self.weight
        if self.form == "double":
            wide = x.double()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            return wide.float() * self.weight
        if self.form == "clamped":
            root = x.square().mean(-1, keepdim=True).sqrt()
            return x / root.clamp(min=1e-5**0.5) * self.weight
        if self.form == "one plus":
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
            return normed * (1 + self.weight)
        if self.form == "columns":
            return x * torch.rsqrt(x.square().mean(0, keepdim=True) + 1e-5) * self.weight
        if self.form == "eps outside":
            return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5) * self.weight
        if self.form == "sum":
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5) * self.weight
        statistic = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        normed = x * statistic * self.weight
        return normed + statistic if self.form == "shared" else normed


SPELLINGS = (
    *("plain", "divide", "power", "cast", "double"),
    *("whole", "whole, default eps", "einsum", "length"),
)


@pytest.mark.parametrize("form", SPELLINGS)
def test_fuses_every_spelling(form: str) -> None:
    inputs = {"x": torch.randn(5, 6)}
    gm = export(Norm(form), "prefill", inputs)
    before = evaluate(gm, inputs)
    assert not apply(FuseRmsNorm(), gm, "prefill").refusals
    assert calls(gm) == ["rms_norm"]
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old)
    assert not apply(FuseRmsNorm(), gm, "prefill").modified


def test_a_narrow_input_with_a_narrow_result_fuses() -> None:
    inputs = {"x": torch.randn(5, 6).bfloat16()}
    gm = export(Norm("cast", torch.float32), "prefill", inputs)
    apply(FuseRmsNorm(), gm, "prefill")
    assert calls(gm) == ["rms_norm"]


def test_a_promoted_result_is_left_alone() -> None:
    inputs = {"x": torch.randn(5, 6).bfloat16()}
    gm = export(Norm("plain", torch.float32), "prefill", inputs)
    result = apply(FuseRmsNorm(), gm, "prefill")
    assert calls(gm) == []
    assert {refusal.rule for refusal in result.refusals} <= {
        "dtype promotion",
        "x * rsqrt(mean(x^2) + eps) * weight",
    }


@pytest.mark.parametrize(
    ("form", "rule"),
    [
        ("eps outside", "eps is inside the root"),
        ("clamped", "x * rsqrt(mean(x^2) + eps) * weight"),
        ("one plus", "x * rsqrt(mean(x^2) + eps) * weight"),
        ("columns", "x * rsqrt(mean(x^2) + eps) * weight"),
        ("sum", "x * rsqrt(mean(x^2) + eps) * weight"),
        ("shared", "shared intermediate"),
    ],
)
def test_refuses_a_near_miss(form: str, rule: str) -> None:
    gm = export(Norm(form), "prefill", {"x": torch.randn(5, 6)})
    (refusal,) = apply(FuseRmsNorm(), gm, "prefill").refusals
    assert refusal.rule == rule
    assert calls(gm) == []
