"""A residual's addition and the norm behind it, as one operator.

    s = a + b                          y, _, s = npu_add_rms_norm(a, b, gamma, eps)
    y = npu_rms_norm(s, gamma, eps)
    ... s ...                          ... s ...

Works on a lowered graph. Left alone, with a reason: an addition that broadcasts, scales or promotes; a
sum whose norm is taken by something else first. Attention Residuals mix before they norm: a model that
has them has no such site but in what its attention adds to itself.
"""

from __future__ import annotations

import operator
import time

import torch
from torch import fx
from torch.fx import Node

from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import Match, PassResult, Refusal

NAME = "fuse_add_rms_norm"


def fuse_add_rms_norm(gm: fx.GraphModule) -> PassResult:
    """Fuse in place; a match a site, a refusal a norm of a sum that stays."""
    start = time.perf_counter()
    before = len(gm.graph.nodes)
    matches: list[Match] = []
    refusals: list[Refusal] = []
    for norm in [n for n in gm.graph.nodes if op_name(n) == "npu::npu_rms_norm"]:
        total = norm.args[0]
        if not isinstance(total, Node) or op_name(total) != "aten::add":
            continue
        reason = _reason(norm, total)
        if reason is not None:
            refusals.append(Refusal(norm.name, "addition and norm", reason, "none needed"))
            continue
        matches.append(Match(norm.name, (_fuse(gm.graph, norm, total).name,)))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return PassResult(
        NAME,
        tuple(matches),
        tuple(refusals),
        bool(matches),
        before,
        len(gm.graph.nodes),
        0,
        time.perf_counter() - start,
    )


def _reason(norm: Node, total: Node) -> str | None:
    if len(total.args) != 2 or total.kwargs or not all(isinstance(a, Node) for a in total.args):
        return f"{total.name} scales or adds a number"
    values = [total.meta["val"], *(a.meta["val"] for a in total.args)]  # type: ignore[union-attr]
    if len({(str(v.shape), v.dtype) for v in values}) > 1:
        return f"{total.name} broadcasts or promotes"
    gamma = norm.args[1]
    if not isinstance(gamma, Node) or not gamma < total:
        return f"its weight is computed after {total.name}"
    return None


def _fuse(graph: fx.Graph, norm: Node, total: Node) -> Node:
    with graph.inserting_before(total):
        fused = graph.call_function(
            torch.ops.npu.npu_add_rms_norm.default, (*total.args, *norm.args[1:]), norm.kwargs
        )
        items = [graph.call_function(operator.getitem, (fused, place)) for place in range(3)]
    normed, rstd = norm.meta["val"]
    fused.meta["val"] = (normed, rstd, total.meta["val"])
    for item, value in zip(items, fused.meta["val"], strict=True):
        item.meta["val"] = value
    for user in list(norm.users):
        user.replace_all_uses_with(items[user.args[1]])  # type: ignore[index]
    total.replace_all_uses_with(items[2], delete_user_cb=lambda user: user is not fused)
    return fused
