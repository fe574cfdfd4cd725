"""The indexer's fusion: other ways to write it, near misses with their reasons, hazards, values."""

from __future__ import annotations

import pytest
import torch

from hybridge.ir.pass_base import PassResult
from hybridge.ir.signature import PHASES
from hybridge.passes.canonicalise import Canonicalise
from hybridge.passes.fuse_lightning_indexer import FuseLightningIndexer
from plain_maths import PlainIndexer, apply, calls, evaluate, export, indexer_inputs


def fuse(phase: str, **options: str) -> PassResult:
    gm = export(PlainIndexer(phase, **options), phase, indexer_inputs(phase))
    return apply(FuseLightningIndexer(), gm, phase)


@pytest.mark.parametrize("form", ["einsum", "bmm"])
@pytest.mark.parametrize("phase", PHASES)
def test_fuses_the_same_maths_written_differently(phase: str, form: str) -> None:
    inputs = indexer_inputs(phase)
    gm = export(PlainIndexer(phase, form=form), phase, inputs)
    before = evaluate(gm, inputs)
    result = apply(FuseLightningIndexer(), gm, phase)
    assert not result.refusals
    assert calls(gm) == ["lightning_indexer"]
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old)


def test_a_second_run_changes_nothing() -> None:
    gm = export(PlainIndexer("prefill"), "prefill", indexer_inputs("prefill"))
    apply(FuseLightningIndexer(), gm, "prefill")
    assert not apply(FuseLightningIndexer(), gm, "prefill").modified


def test_only_the_op_is_left() -> None:
    gm = export(PlainIndexer("prefill"), "prefill", indexer_inputs("prefill"))
    result = apply(FuseLightningIndexer(), gm, "prefill")
    apply(Canonicalise(), gm, "prefill")
    assert sum(node.op == "call_function" for node in gm.graph.nodes) == 1
    assert result.bytes_removed > 0


@pytest.mark.parametrize(
    ("mistake", "rule"),
    [
        ("strict mask", "a token sees its own position"),
        ("relu after", "relu comes before the head weights"),
        ("no relu", "scores are rectified by relu"),
        ("finite mask", "the mask is -inf, not a large number"),
        ("fp16 mask", "the mask is -inf, not a large number"),
        ("last tie", "equal scores go to the lowest position"),
        ("zero tail", "the tail is -1"),
        ("unordered", "positions ascend"),
        ("topk", "undetermined op"),
        ("unstable", "unstable sort"),
    ],
)
def test_refuses_a_near_miss_by_name(mistake: str, rule: str) -> None:
    result = fuse(
        "decode" if mistake in ("strict mask", "last tie") else "prefill", mistake=mistake
    )
    assert not result.matches
    assert [refusal.rule for refusal in result.refusals] == [rule]


def test_a_refusal_shows_where_the_graph_differs() -> None:
    (refusal,) = fuse("prefill", mistake="strict mask").refusals
    assert "gives" in refusal.reason
    assert "the definition" in refusal.reason
    assert "lightning_indexer" in refusal.remedy


def test_refuses_a_missing_mask() -> None:
    result = fuse("prefill", mistake="no mask")
    assert not result.matches


def test_refuses_a_score_that_is_used_elsewhere() -> None:
    (refusal,) = fuse("prefill", mistake="shared score").refusals
    assert refusal.rule == "shared intermediate"
    assert "sum" in refusal.reason


def test_refuses_a_write_between_read_and_result() -> None:
    (refusal,) = fuse("prefill", mistake="write between").refusals
    assert refusal.rule == "write between"
    assert "writes indexer_cache" in refusal.reason


@pytest.mark.parametrize("phase", PHASES)
def test_short_long_and_tied_rows_have_the_op_values(phase: str) -> None:
    inputs = indexer_inputs(phase)
    inputs["head_weights"] = torch.zeros_like(inputs["head_weights"])
    gm = export(PlainIndexer(phase), phase, inputs)
    before = evaluate(gm, inputs)
    apply(FuseLightningIndexer(), gm, phase)
    assert torch.equal(evaluate(gm, inputs)[0], before[0])


def test_a_write_to_a_value_of_the_region_goes_with_it() -> None:
    """The padding is filled in place: nobody outside sees that, and the op needs no padding."""
    inputs = indexer_inputs("decode")
    gm = export(PlainIndexer("decode"), "decode", inputs)
    fill = next(node for node in gm.graph.nodes if "new_full" in str(node.target))
    with gm.graph.inserting_after(fill):
        write = gm.graph.call_function(torch.ops.aten.mul_.Tensor, (fill, 2.0))
    write.meta["val"] = fill.meta["val"]
    gm.recompile()
    before = evaluate(gm, inputs)
    assert not apply(FuseLightningIndexer(), gm, "decode").refusals
    assert calls(gm) == ["lightning_indexer"]
    assert torch.equal(evaluate(gm, inputs)[0], before[0])
