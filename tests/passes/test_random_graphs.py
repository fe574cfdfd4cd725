"""Model parts with random noise in them: the pipeline never changes what a graph computes, and never fails.

Noise goes in at random places: views there and back, copies, casts, multiplications by one, second users that become
outputs, writes to caches. Some of it hides a fusion, some of it forbids one. HYPOTHESIS_PROFILE=soak runs many more.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from hybridge.compiler.pipeline import PIPELINE
from hybridge.ir.pass_base import PassContext, fake_result, run_pass
from hybridge.ir.spec import violations
from plain_maths import (
    PlainAttention,
    PlainIndexer,
    PlainMix,
    PlainResiduals,
    attention_inputs,
    evaluate,
    export,
    indexer_inputs,
    mix_inputs,
)

aten = torch.ops.aten
PROOFS: dict[str, Any] = {}

PARTS: tuple[tuple[str, Callable[[], Any], Callable[[], dict[str, Tensor]]], ...] = (
    ("prefill", lambda: PlainIndexer("prefill"), lambda: indexer_inputs("prefill", padding=0)),
    ("decode", lambda: PlainIndexer("decode", form="bmm"), lambda: indexer_inputs("decode")),
    ("prefill", lambda: PlainAttention("prefill"), lambda: attention_inputs("prefill", padding=0)),
    (
        "prefill",
        lambda: PlainAttention("prefill", sparse=False, form="softmax"),
        lambda: attention_inputs("prefill", sparse=False, padding=0),
    ),
    ("decode", lambda: PlainAttention("decode"), lambda: attention_inputs("decode")),
    ("prefill", PlainMix, mix_inputs),
    ("prefill", lambda: PlainMix(form="cat"), mix_inputs),
    ("prefill", PlainResiduals, mix_inputs),
)


@cache
def _exported(place: int) -> GraphModule:
    phase, make, inputs = PARTS[place]
    torch.manual_seed(place)
    return export(make(), phase, inputs())


def _copy(place: int) -> GraphModule:
    original = _exported(place)
    result = copy.deepcopy(original)
    for old, new in zip(original.graph.nodes, result.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    result.meta = dict(original.meta)
    return result


class Noise:
    """Puts nodes into a graph, after a node or in its place."""

    def __init__(self, gm: GraphModule, choose: random.Random) -> None:
        self.gm, self.choose = gm, choose

    def add(self) -> None:
        self.choose.choice((self._round_trip, self._second_user, self._write))()

    def _floats(self, op: str = "call_function") -> list[Node]:
        return [
            node
            for node in self.gm.graph.nodes
            if node.op == op
            and isinstance(node.meta.get("val"), Tensor)
            and node.meta["val"].is_floating_point()
            and "weight" not in node.meta
        ]

    def _call(self, before: Node, target: Any, *args: Any) -> Node:
        with self.gm.graph.inserting_before(before):
            node = self.gm.graph.call_function(target, args)
        node.meta["val"] = fake_result(node)
        return node

    def _round_trip(self) -> None:
        """A value goes through ops that give it back."""
        node = self.choose.choice(self._floats())
        users, place = list(node.users), node.next
        rank = node.meta["val"].dim()
        kind = self.choose.randrange(5)
        if kind == 0:
            result = self._call(
                place, aten.squeeze.dim, self._call(place, aten.unsqueeze.default, node, 0), 0
            )
        elif kind == 1:
            result = self._call(place, aten.clone.default, node)
        elif kind == 2:
            result = self._call(place, aten.mul.Tensor, node, 1.0)
        elif kind == 3 and rank > 1:
            swapped = self._call(place, aten.transpose.int, node, 0, rank - 1)
            result = self._call(place, aten.transpose.int, swapped, 0, rank - 1)
        else:
            wide = self._call(place, aten.to.dtype, node, torch.float64)
            result = self._call(place, aten.to.dtype, wide, torch.float32)
        for user in users:
            user.replace_input_with(node, result)

    def _second_user(self) -> None:
        """A value is also a result, after some maths."""
        node = self.choose.choice(self._floats())
        output = next(iter(reversed(self.gm.graph.nodes)))
        extra = self._call(output, aten.mul.Tensor, node, 0.5)
        output.args = ((*output.args[0], extra),)

    def _write(self) -> None:
        """An input is scaled in place somewhere."""
        inputs = self._floats("placeholder")
        body = [node for node in self.gm.graph.nodes if node.op == "call_function"]
        self._call(self.choose.choice(body), aten.mul_.Tensor, self.choose.choice(inputs), 0.5)


@settings(max_examples=max(100, 2 * settings.default.max_examples if settings.default else 0))
@given(seed=st.integers(0, 10**9))
def test_the_pipeline_never_changes_results(seed: int) -> None:
    choose = random.Random(seed)
    place = choose.randrange(len(PARTS))
    phase, _, make_inputs = PARTS[place]
    gm, inputs = _copy(place), make_inputs()
    noise = Noise(gm, choose)
    for _ in range(choose.randrange(4)):
        noise.add()
    gm.recompile()
    before = evaluate(gm, inputs)
    for step in PIPELINE:
        run_pass(step, PassContext(gm, phase, PROOFS))
        assert violations(gm) == []
    for old, new in zip(before, evaluate(gm, inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4, equal_nan=True)
