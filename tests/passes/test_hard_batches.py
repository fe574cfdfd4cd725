"""Batches that broke other systems, on fused graphs: padding, holes in the block table, shared blocks, long rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from hybridge.ir.batch import Batch
from hybridge.ir.pass_base import Pass
from hybridge.ir.signature import PHASES
from hybridge.passes.fuse_kda import FuseKda
from hybridge.passes.fuse_lightning_indexer import FuseLightningIndexer
from hybridge.passes.fuse_sparse_flash_attention import FuseSparseFlashAttention
from kda_graphs import PlainKda, inputs_of
from plain_maths import (
    BLOCK,
    HEADS,
    WIDTH,
    ExpandedAttention,
    PlainAttention,
    PlainIndexer,
    apply,
    attention_inputs,
    batch,
    calls,
    evaluate,
    export,
    indexer_inputs,
)

Inputs = dict[str, Tensor]
Made = tuple[Pass, nn.Module, Inputs]


def indexer(phase: str) -> Made:
    return FuseLightningIndexer(), PlainIndexer(phase), indexer_inputs(phase)


def sparse(phase: str) -> Made:
    return FuseSparseFlashAttention(), PlainAttention(phase), attention_inputs(phase)


def dense(phase: str) -> Made:
    return FuseSparseFlashAttention(), PlainAttention(phase, False), attention_inputs(phase, False)


def expanded(phase: str) -> Made:
    inputs = attention_inputs(phase, False, expanded=True)
    return FuseSparseFlashAttention(), ExpandedAttention(phase, False), inputs


def fused(made: Made, phase: str) -> tuple[GraphModule, GraphModule]:
    """The graph as it is written, and fused."""
    step, module, inputs = made
    plain, gm = export(module, phase, inputs), export(module, phase, inputs)
    assert len(apply(step, gm, phase).matches) == 1
    return plain, gm


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("make", [indexer, sparse, dense, expanded])
def test_holes_and_shared_blocks_are_read_alike(make: Callable[[str], Made], phase: str) -> None:
    """No entry past a sequence's end is a block, and two sequences have their first block in common."""
    made = make(phase)
    plain, gm = fused(made, phase)
    example, table = batch(phase), made[2]["block_table"].clone()
    for row, (length, context) in enumerate(zip(example.lengths, example.contexts, strict=True)):
        table[row, -(-(length + context) // BLOCK) :] = -1
    table[2, 0] = table[0, 0]
    assert (table < 0).any()
    inputs = {**made[2], "block_table": table}
    rows = example.real_tokens
    before, after = evaluate(plain, inputs)[0], evaluate(gm, inputs)[0]
    torch.testing.assert_close(after[:rows], before[:rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [indexer, sparse, dense])
def test_what_padding_tokens_hold_reaches_no_other_token(make: Callable[[str], Made]) -> None:
    made = make("prefill")
    plain, gm = fused(made, "prefill")
    rows, query = batch("prefill").real_tokens, made[2]["query"].clone()
    assert query.shape[0] > rows
    query[rows:] = float("nan")
    before = evaluate(plain, made[2])[0]
    after = evaluate(gm, {**made[2], "query": query})[0]
    torch.testing.assert_close(after[:rows], before[:rows], rtol=1e-5, atol=1e-5)
    if make is indexer:
        assert (after[rows:] == -1).all()


@pytest.mark.parametrize("phase", PHASES)
def test_padding_and_inactive_rows_change_no_recurrent_state(phase: str) -> None:
    inputs = inputs_of(phase)
    plain, gm = fused((FuseKda(), PlainKda(phase), inputs), phase)
    example, idle = batch(phase), 2
    inputs["state_slot"] = inputs["state_slot"].clone()
    inputs["state_slot"][idle] = -1
    before = evaluate(plain, inputs)
    first = sum(example.lengths[:idle])
    inputs["x"] = inputs["x"].clone()
    inputs["x"][first:] = float("nan")  # the idle sequence is the last; padding follows it
    after = evaluate(gm, inputs)
    torch.testing.assert_close(after[0][:first], before[0][:first], rtol=1e-4, atol=1e-4)
    owned = [int(slot) for slot in inputs["state_slot"] if slot >= 0]
    others = [slot for slot in range(example.slots) if slot not in owned]
    for name, old, new in zip(("conv_state", "kda_state"), before[-2:], after[-2:], strict=True):
        torch.testing.assert_close(new[owned], old[owned], rtol=1e-4, atol=1e-4)
        assert torch.equal(new[others], inputs[name][others])


LONG = {
    "decode": Batch("long", (1, 1, 1), (2050, 2047, 3), 3, (True,) * 3, BLOCK, 513, 1030, 5),
    "prefill": Batch("long", (3, 2), (2048, 2047), 7, (True,) * 2, BLOCK, 513, 1030, 5),
}


@pytest.mark.parametrize("top_k", [2048, 2051])
@pytest.mark.parametrize("phase", PHASES)
def test_scores_that_fp16_does_not_have_are_ranked_in_a_row_of_2051(phase: str, top_k: int) -> None:
    """Every score is below -65504, many are equal; whole numbers, so that no order of summing rounds them."""
    example, generator = LONG[phase], torch.Generator().manual_seed(5)
    tables = example.inputs()
    size = (example.blocks, BLOCK, 1, WIDTH)
    weights = torch.full((example.tokens, HEADS), -(2.0**17))
    inputs = {
        "query": torch.randint(1, 4, (example.tokens, HEADS, WIDTH), generator=generator).float(),
        "head_weights": weights,
        "indexer_cache": torch.randint(1, 5, size, generator=generator).float(),
        **{name: tables[name] for name in ("query_start", "context_len", "block_table")},
    }
    plain, gm = fused((FuseLightningIndexer(), PlainIndexer(phase, top_k=top_k), inputs), phase)
    assert calls(gm) == ["lightning_indexer"]
    chosen = evaluate(gm, inputs)[0]
    assert torch.equal(chosen, evaluate(plain, inputs)[0])
    for token in range(example.real_tokens):
        visible = example.position_of(token) + 1
        assert int((chosen[token] >= 0).sum()) == min(visible, top_k)
        assert int(chosen[token].max()) < visible
