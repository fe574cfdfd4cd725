"""A value that a fused op reads is written between where the graph reads it and where the op would: no pass fuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import Pass, PassContext, PassResult, run_pass
from hybridge.passes.fuse_attn_res import FuseAttnRes
from hybridge.passes.fuse_attn_res_norm import FuseAttnResNorm
from hybridge.passes.fuse_kda import FuseKda
from hybridge.passes.fuse_lightning_indexer import FuseLightningIndexer
from hybridge.passes.fuse_moe import FuseMoe
from hybridge.passes.fuse_rms_norm import FuseRmsNorm
from hybridge.passes.fuse_situ import FuseSitu
from hybridge.passes.fuse_sparse_flash_attention import FuseSparseFlashAttention
from hybridge.passes.merge_projections import MergeProjections
from kda_graphs import PlainKda, inputs_of
from plain_maths import (
    ExpandedAttention,
    PlainAttention,
    PlainIndexer,
    PlainMix,
    attention_inputs,
    copied,
    export,
    indexer_inputs,
    mix_inputs,
)

aten = torch.ops.aten
WIDTH, EXPERTS, KEPT = 8, 6, 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Situ(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * (25.0 * torch.tanh(up / 25.0))


class Router(nn.Module):
    """The experts work on another tensor than the router."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((EXPERTS, WIDTH), (EXPERTS,), (EXPERTS, 4, WIDTH), (EXPERTS, WIDTH, 2))
        self.gate, self.bias, self.gate_up, self.down = (
            nn.Parameter(torch.randn(shape)) for shape in shapes
        )

    def forward(self, x: Tensor, latent: Tensor) -> Any:
        scores = torch.sigmoid(torch.nn.functional.linear(x, self.gate))
        order = torch.argsort(scores + self.bias, descending=True, stable=True)[:, :KEPT]
        weights = scores.gather(1, order)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.ops.hybridge.moe_experts(
            latent, order.int(), weights, self.gate_up, self.down,
            activation="silu", beta=4.0, linear_beta=None,
        )  # fmt: skip


class NormedSite(nn.Module):
    """A site of the residuals after its fusion; nothing is added to its prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.weight = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, embedding: Tensor, block: Tensor, first: Tensor, second: Tensor) -> Any:
        statistics = torch.ops.hybridge.attn_res_prepare(
            torch.stack([embedding, block]), self.query.unsqueeze(0), eps=1e-5
        )
        h = torch.ops.hybridge.attn_res_update(first, self.query, *statistics, site=0, eps=1e-5)
        return torch.ops.hybridge.rms_norm(h, self.weight, eps=1e-5), second


def tensors(*names: str) -> dict[str, Tensor]:
    return {name: torch.randn(5, WIDTH) for name in names}


@dataclass(frozen=True)
class Case:
    """A graph in which the last of `steps` has a site, and inputs that the fused op reads.

    Args:
        reads: names of inputs.
        before: (op, which call of it): where the write goes; in between for every one of `reads`.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    steps: tuple[Pass, ...]
    reads: tuple[str, ...]
    before: tuple[str, int]
    phase: str = "prefill"


TABLES = ("query_start", "context_len", "block_table")
STATES = ("conv_state", "kda_state")
KDA_TABLES = ("query_start", "context_len", "state_slot")
SPARSE = FuseSparseFlashAttention()

CASES = {
    "rms_norm": Case(Norm, lambda: tensors("x"), (FuseRmsNorm(),), ("x",), ("aten::mul", 0)),
    "situ": Case(
        Situ, lambda: tensors("gate", "up"), (FuseSitu(),), ("gate", "up"), ("aten::mul", -1)
    ),
    "moe": Case(Router, lambda: tensors("x", "latent"), (FuseMoe(),), ("x",), ("aten::div", -1)),
    "attn_res, first site": Case(
        PlainMix, mix_inputs, (FuseAttnRes(),), ("embedding", "block", "first"), ("aten::einsum", 0)
    ),
    "attn_res, later site": Case(
        PlainMix, mix_inputs, (FuseAttnRes(),), ("embedding", "block"), ("aten::stack", 1)
    ),
    "attn_res_norm": Case(
        NormedSite,
        mix_inputs,
        (FuseAttnResNorm(),),
        ("first",),
        ("hybridge::rms_norm", 0),
    ),
    "indexer, prefill": Case(
        lambda: PlainIndexer("prefill"),
        lambda: indexer_inputs("prefill"),
        (FuseLightningIndexer(),),
        ("query", "head_weights", "indexer_cache", *TABLES),
        ("aten::to", -1),
    ),
    "indexer, decode": Case(
        lambda: PlainIndexer("decode"),
        lambda: indexer_inputs("decode"),
        (FuseLightningIndexer(),),
        ("query", "head_weights", "indexer_cache", "context_len", "block_table"),
        ("aten::to", -1),
        "decode",
    ),
    "sparse attention": Case(
        lambda: PlainAttention("prefill"),
        lambda: attention_inputs("prefill"),
        (SPARSE,),
        ("query", "latent_cache", "positions", *TABLES),
        ("aten::bmm", -1),
    ),
    "dense attention": Case(
        lambda: PlainAttention("decode", sparse=False),
        lambda: attention_inputs("decode", sparse=False),
        (SPARSE,),
        ("query", "latent_cache", "context_len", "block_table"),
        ("aten::bmm", -1),
        "decode",
    ),
    "expanded attention": Case(
        lambda: ExpandedAttention("prefill"),
        lambda: attention_inputs("prefill", expanded=True),
        (SPARSE,),
        ("query", "latent_cache", "positions", *TABLES),
        ("aten::einsum", -1),
    ),
    "kda, prefill": Case(
        lambda: PlainKda("prefill"),
        lambda: inputs_of("prefill"),
        (FuseKda(),),
        (*KDA_TABLES, "conv_state"),
        ("hybridge::kda_recurrence", -1),
    ),
    "kda, decode": Case(
        lambda: PlainKda("decode"),
        lambda: inputs_of("decode"),
        (FuseKda(),),
        ("x", "context_len", "state_slot", *STATES),
        ("hybridge::state_write", -1),
        "decode",
    ),
    "merged projections": Case(
        lambda: PlainKda("prefill"),
        lambda: inputs_of("prefill"),
        (FuseKda(), MergeProjections()),
        ("x",),
        ("aten::matmul", 2),
    ),
}


PROOFS: dict[str, Any] = {}


@cache
def prepared(name: str) -> GraphModule:
    """The case's graph before the pass in question."""
    case = CASES[name]
    gm = export(case.make(), case.phase, case.inputs())
    for step in case.steps[:-1]:
        run_pass(step, PassContext(gm, case.phase, PROOFS))
    return gm


def fuse(gm: GraphModule, case: Case) -> PassResult:
    return run_pass(case.steps[-1], PassContext(gm, case.phase, PROOFS))


def plant(gm: GraphModule, name: str, before: tuple[str, int]) -> Node:
    """A write to a graph input before one of the calls of an op."""
    op, which = before
    place = [node for node in gm.graph.nodes if op_name(node) == op][which]
    (value,) = (node for node in gm.graph.nodes if node.op == "placeholder" and node.name == name)
    with gm.graph.inserting_before(place):
        write = gm.graph.call_function(aten.zero_.default, (value,))
    write.meta["val"] = value.meta["val"]
    return write


@pytest.mark.parametrize(
    ("case", "read"), [(name, read) for name, case in CASES.items() for read in case.reads]
)
def test_no_pass_reads_what_was_written_since(case: str, read: str) -> None:
    gm = copied(prepared(case))
    write = plant(gm, read, CASES[case].before)
    texts = [str(refusal) for refusal in fuse(gm, CASES[case]).refusals]
    assert any(f"write between: {write.name} writes {read} between" in text for text in texts), (
        texts
    )


@pytest.mark.parametrize("case", CASES)
def test_without_a_write_the_pass_fuses(case: str) -> None:
    result = fuse(copied(prepared(case)), CASES[case])
    assert result.matches
    assert not result.refusals
