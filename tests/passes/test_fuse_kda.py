"""FlashKDA and MegaKDA: other spellings, states, near misses, hazards."""

from __future__ import annotations

import pytest
import torch

from hybridge.ir.signature import PHASES
from hybridge.passes.fuse_kda import FuseKda
from kda_graphs import RANK, D, H, P, PlainKda, inputs_of
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
        ("decode", "l2 eps", "inside the root of the L2 norms"),
        ("prefill", "l2 eps", "inside the root of the L2 norms"),
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
