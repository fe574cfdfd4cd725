"""Stage two of AttnRes with the add before it and the norm after it: restarts, readers in between, values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from hybridge.ir.pass_base import PassResult
from hybridge.passes.fuse_attn_res import FuseAttnRes
from hybridge.passes.fuse_attn_res_norm import FuseAttnResNorm
from hybridge.passes.fuse_rms_norm import FuseRmsNorm
from plain_maths import PlainResiduals, apply, calls, evaluate, export, mix_inputs

PREPARE, UPDATE = "attn_res_prepare", "attn_res_update"
BARE, WHOLE = "attn_res_update_norm", "attn_res_add_update_norm"


def fused(form: str) -> tuple[GraphModule, PassResult, list[Tensor], list[Tensor]]:
    """The graph after the pass, what the pass says, and the values before and after it."""
    torch.manual_seed(3)
    inputs = mix_inputs()
    gm = export(PlainResiduals(form), "prefill", inputs)
    before = evaluate(gm, inputs)
    apply(FuseAttnRes(), gm, "prefill")
    apply(FuseRmsNorm(), gm, "prefill")
    result = apply(FuseAttnResNorm(), gm, "prefill")
    return gm, result, before, evaluate(gm, inputs)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("plain", [BARE, WHOLE, WHOLE]),
        ("delta first", [BARE, WHOLE, WHOLE]),
        ("written", [BARE, WHOLE, BARE]),
        ("scaled", [BARE, BARE, WHOLE]),
        ("broadcast", [BARE, BARE, WHOLE]),
        ("indexed", [BARE, UPDATE, "rms_norm", WHOLE]),
        ("other axis", [BARE, UPDATE, WHOLE]),
        ("h read", [BARE, UPDATE, "rms_norm", WHOLE]),
    ],
)
def test_each_site_takes_what_belongs_to_it(form: str, expected: list[str]) -> None:
    gm, result, before, after = fused(form)
    assert calls(gm) == [PREPARE, *expected]
    assert len(result.matches) == expected.count(BARE) + expected.count(WHOLE)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
    assert not apply(FuseAttnResNorm(), gm, "prefill").modified


def test_the_older_operand_is_the_prefix() -> None:
    gm, *_ = fused("delta first")
    site = next(node for node in gm.graph.nodes if WHOLE in str(node.target))
    assert [node.name for node in site.args[:2]] == ["tanh", "sin"]


def test_a_mix_that_someone_else_reads_is_refused() -> None:
    _, result, *_ = fused("h read")
    (refusal,) = result.refusals
    assert refusal.rule == "shared intermediate"
    assert "is used outside of the region, by add" in refusal.reason


class FirstSite(nn.Module):
    """One site whose sum is read before its statistics exist."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.weight = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, embedding: Tensor, block: Tensor, first: Tensor, second: Tensor) -> Any:
        prefix = first + second
        values = torch.stack([embedding, block * prefix, prefix])
        normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5)
        weights = torch.softmax((normed * self.query).sum(-1), dim=0)
        h = (weights.unsqueeze(-1) * values).sum(0)
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3) * self.weight


def test_a_sum_that_the_statistics_need_stays_in_front_of_them() -> None:
    inputs = mix_inputs()
    gm = export(FirstSite(), "prefill", inputs)
    before = evaluate(gm, inputs)
    for step in (FuseAttnRes(), FuseRmsNorm(), FuseAttnResNorm()):
        apply(step, gm, "prefill")
    assert calls(gm) == [PREPARE, BARE]
    torch.testing.assert_close(evaluate(gm, inputs)[0], before[0], rtol=1e-5, atol=1e-5)
