"""Aliases, writes and what lies between two nodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Node

from hybridge.ir.effects import Effects, has_effect, op_name
from hybridge.ir.region import conflict, insertion_point, make_region
from plain_maths import export


class Writes(nn.Module):
    def forward(self, x: Tensor, indexer_cache: Tensor, slot_mapping: Tensor) -> Tensor:
        row = indexer_cache.view(-1, 4)[0]
        before = row * 2
        torch.ops.hybridge.paged_write(indexer_cache, x.unsqueeze(1), slot_mapping)
        copy = indexer_cache.clone()
        copy[0].zero_()
        return before + row + copy.sum()


def traced() -> tuple[dict[str, Node], Effects]:
    inputs = {
        "x": torch.randn(3, 4),
        "indexer_cache": torch.randn(4, 2, 1, 4),
        "slot_mapping": torch.arange(3, dtype=torch.int32),
    }
    gm = export(Writes(), "prefill", inputs)
    nodes: dict[str, Node] = {}
    for node in gm.graph.nodes:
        nodes.setdefault(op_name(node) if node.op == "call_function" else node.name, node)
    return nodes, Effects(gm.graph)


def test_views_share_their_owners_storage() -> None:
    nodes, effects = traced()
    cache = nodes["indexer_cache"]
    assert effects.roots(nodes["aten::view"]) == {cache}
    assert effects.roots(nodes["aten::clone"]) == {nodes["aten::clone"]}


def test_a_write_is_seen_through_a_view() -> None:
    nodes, effects = traced()
    assert [op_name(node) for node in effects.writes_to(nodes["aten::select"])] == [
        "hybridge::paged_write"
    ]
    assert [op_name(node) for node in effects.writes_to(nodes["aten::clone"])] == ["aten::zero_"]


def test_writes_have_effects_and_maths_has_none() -> None:
    nodes, _ = traced()
    assert has_effect(nodes["hybridge::paged_write"])
    assert has_effect(nodes["aten::zero_"])
    assert not has_effect(nodes["aten::mul"])


def test_a_read_does_not_move_over_a_write() -> None:
    nodes, effects = traced()
    (add,) = nodes["aten::mul"].users
    late = conflict(make_region([nodes["aten::mul"], add], [add]), add.next, effects)
    early = make_region([nodes["aten::mul"]], [nodes["aten::mul"]])
    assert late is not None
    assert late.other is nodes["hybridge::paged_write"]
    assert conflict(early, insertion_point(early), effects) is None
