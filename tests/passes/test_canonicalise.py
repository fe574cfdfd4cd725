"""Noise goes, and what only looks like noise stays (cases 1 and 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridge.ir.effects import op_name
from hybridge.passes.canonicalise import Canonicalise
from plain_maths import apply, evaluate, export


def simplify(module: nn.Module, **inputs: Tensor) -> tuple[list[str], Any]:
    """Ops that are left, and the pass's result; values must not change."""
    gm = export(module, "prefill", inputs)
    before = evaluate(gm, inputs)
    result = apply(Canonicalise(), gm, "prefill")
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        assert torch.equal(old, new)
    assert not apply(Canonicalise(), gm, "prefill").modified
    left = [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]
    return left, result


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32).contiguous().view(x.shape)[:, :].clone()
        unused = y.exp()
        del unused
        return torch.relu(y * 1.0)


def test_noise_disappears() -> None:
    left, _ = simplify(Noise(), x=torch.randn(5, 4))
    assert left == ["aten::relu"]


class ShiftInPlace(nn.Module):
    def forward(self, state: Tensor) -> Tensor:
        state[1:] = state[:-1].clone()
        return state * 2


def test_a_clone_between_a_read_and_a_write_stays() -> None:
    left, result = simplify(ShiftInPlace(), state=torch.randn(8, 2))
    assert "aten::clone" in left
    assert "copy separates a write" in {refusal.rule for refusal in result.refusals}


class WriteBesideClone(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        y.add_(x)
        return y * 2, x * 3


def test_a_clone_that_is_written_stays() -> None:
    left, _ = simplify(WriteBesideClone(), x=torch.randn(8, 2))
    assert "aten::clone" in left


class ReturnsClone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def test_an_output_keeps_its_own_storage() -> None:
    left, _ = simplify(ReturnsClone(), x=torch.randn(8, 2))
    assert left == ["aten::clone"]


class Promotes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(torch.float32) * 1.0


def test_casts_that_round_stay() -> None:
    left, _ = simplify(Promotes(), x=torch.randn(8, 2))
    assert left == ["aten::to", "aten::to"]


class SharedUser(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        i = x * 1.0
        return i + 5, i * 2


def test_a_shared_no_op_serves_both_users() -> None:
    left, _ = simplify(SharedUser(), x=torch.randn(8, 2))
    assert left == ["aten::add", "aten::mul"]
