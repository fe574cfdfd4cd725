"""What the framework holds a pass to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from hybridge.artifacts.errors import CompileError
from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import Pass, PassContext, Refusal, Rewriter, Site
from hybridge.ir.region import make_region
from hybridge.ir.spec import require_model, require_valid, violations
from hybridge.ir.text import graph_text, region_text
from plain_maths import apply, evaluate, export

aten = torch.ops.aten


class AddThenDouble(nn.Module):
    """Case 3: `i` has two users."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        i = x + 5
        return i.relu(), i * 2


class Once(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 5).relu()


class Merge(Pass):
    """Replaces add + relu by whatever `make` gives."""

    name: ClassVar[str] = "merge"

    def __init__(self, make: Any) -> None:
        self.make = make

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        for node in list(context.graph.nodes):
            if op_name(node) == "aten::relu":
                yield Site(node, make_region([node.args[0], node], [node]))

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        return None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        (x,) = site.region.inputs
        return {site.anchor: self.make(rewriter, x)}


def good(rewriter: Rewriter, x: Node) -> Node:
    return rewriter.call(aten.clamp.default, rewriter.call(aten.add.Tensor, x, 5), 0)


X = {"x": torch.randn(5, 3)}


def test_a_rewrite_keeps_values_and_metadata() -> None:
    gm = export(Once(), "prefill", X)
    before = evaluate(gm, X)
    result = apply(Merge(good), gm, "prefill")
    assert [match.node for match in result.matches] == ["relu"]
    assert torch.equal(evaluate(gm, X)[0], before[0])
    assert violations(gm) == []
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")


def test_an_intermediate_with_another_user_is_refused() -> None:
    gm = export(AddThenDouble(), "prefill", X)
    result = apply(Merge(good), gm, "prefill")
    (refusal,) = result.refusals
    assert refusal.rule == "shared intermediate"
    assert "add is used outside of the region, by mul" in refusal.reason
    assert not result.modified


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda r, x: r.call(aten.to.dtype, x, torch.float64), "from torch.float32 to"),
        (lambda r, x: r.call(aten.unsqueeze.default, x, 0), "changes relu from"),
        (lambda r, x: r.call(aten.add_.Tensor, x, 5), "writes other inputs"),
    ],
)
def test_a_rewrite_that_breaks_a_promise_fails_the_build(make: Any, what: str) -> None:
    gm = export(Once(), "prefill", X)
    with pytest.raises(CompileError, match="merge at relu") as caught:
        apply(Merge(make), gm, "prefill")
    assert what in str(caught.value)


class Rotated(nn.Module):
    """A region after a call that a fused op does again; `written` tells what is written in between."""

    def __init__(self, written: str = "") -> None:
        super().__init__()
        self.written = written

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        negative = x.neg()
        if self.written == "y":
            y.mul_(2)
        elif self.written:
            x[:, :1].mul_(2)
        return (negative + 5).relu(), y * 1.5


class MergeFromX(Merge):
    """The new nodes read x, which the region's input is made from."""

    def __init__(self, names: bool = True) -> None:
        super().__init__(good)
        self.names = names

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        (x,) = (node for node in context.graph.nodes if node.name == "x")
        for site in super().pattern(context):
            assert isinstance(site, Site)
            yield Site(site.anchor, site.region, (x,) if self.names else (), detail=x)

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        return {site.anchor: good(rewriter, rewriter.call(aten.neg.default, site.detail))}


XY = {"x": torch.randn(5, 3), "y": torch.randn(5, 3)}


@pytest.mark.parametrize("written", ["", "y"])
def test_an_op_may_read_what_its_region_is_made_from(written: str) -> None:
    gm = export(Rotated(written), "prefill", XY)
    before = evaluate(gm, XY)
    assert apply(MergeFromX(), gm, "prefill").matches
    assert [op_name(node) for node in gm.graph.nodes].count("aten::neg") == 1
    for old, new in zip(before, evaluate(gm, XY), strict=True):
        assert torch.equal(old, new)


def test_not_if_that_is_written_before_the_op_would_read_it() -> None:
    gm = export(Rotated("a view of x"), "prefill", XY)
    (refusal,) = apply(MergeFromX(), gm, "prefill").refusals
    assert refusal.rule == "write between"
    assert refusal.reason == "mul_ writes x between neg and relu"


def test_a_read_that_the_site_does_not_name_fails_the_build() -> None:
    gm = export(Rotated(), "prefill", XY)
    with pytest.raises(CompileError, match="reads x, which its site does not name"):
        apply(MergeFromX(names=False), gm, "prefill")


def test_text_is_the_same_for_equal_graphs() -> None:
    first, second = (export(Once(), "prefill", X) for _ in range(2))
    assert graph_text(first.graph) == graph_text(second.graph)
    assert "aten::relu(%add)" in graph_text(first.graph)


def test_region_text_tells_constants_apart() -> None:
    gm = export(AddThenDouble(), "prefill", X)
    add, relu, mul = (n for n in gm.graph.nodes if n.op == "call_function")
    assert region_text([add, relu]) != region_text([add, mul])


def test_the_validity_table_names_the_step() -> None:
    gm = export(Once(), "prefill", X)
    next(node for node in gm.graph.nodes if node.op == "call_function").meta.pop("val")
    with pytest.raises(CompileError, match="some_pass: the graph is not valid: shapes recorded"):
        require_valid(gm, "some_pass")


class WritesTwice(nn.Module):
    """Once all of a cache, then all of it or a part."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: Tensor, indexer_cache: Tensor, slot_mapping: Tensor) -> Tensor:
        torch.ops.hybridge.paged_write(indexer_cache, x, slot_mapping)
        part = indexer_cache if self.columns == 4 else indexer_cache[..., : self.columns]
        torch.ops.hybridge.paged_write(part, x[..., : self.columns], slot_mapping)
        return x * 1.5


@pytest.mark.parametrize("columns", [4, 2])
def test_two_writers_of_one_cache_are_the_models_mistake(columns: int) -> None:
    inputs = {
        "x": torch.randn(3, 1, 4),
        "indexer_cache": torch.randn(4, 2, 1, 4),
        "slot_mapping": torch.arange(3, dtype=torch.int32),
    }
    gm = export(WritesTwice(columns), "prefill", inputs)
    what = "one writer a cache: indexer_cache is written by 2 vocabulary ops"
    assert violations(gm) == [what]
    with pytest.raises(CompileError, match=f"trace: {what}; two writes") as caught:
        require_model(gm, "trace")
    assert caught.value.remedy == "write the cache once"
