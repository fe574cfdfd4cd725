"""Fuse stage two of Attention Residuals with the add that precedes it and the RMS norm that follows it.

Before:                                                  After:
    prefix = prefix + delta                                  prefix, y = attn_res_add_update_norm(
    h = attn_res_update(prefix, query, statistics, …)            prefix, delta, query, statistics, weight, …)
    y = rms_norm(h, weight, eps=…)

Where a block restarts, the prefix is a sublayer's output and nothing is added:

    h = attn_res_update(prefix, query, statistics, …)        y = attn_res_update_norm(
    y = rms_norm(h, weight, eps=…)                               prefix, query, statistics, weight, …)

One walk over the tokens replaces three, and h is never in memory. The sum stays a value of its own: later sites add
to it, and a boundary layer freezes it. Of the add's operands the older one is the prefix. Where the sum is needed
before the fused op can run, or the prefix is written in between, the add stays, and the form without one is taken.

Left alone: the output's site, whose h is indexed before the final norm; an h that someone else reads too; an add of
other shapes or dtypes, or one that is scaled: its sum is then the prefix of the form without an add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import (
    ModelShape,
    Pass,
    PassContext,
    Refusal,
    Rewriter,
    Site,
    hazard,
    same_shape,
)
from hybridge.ir.signature import dtype_of, shape_of
from hybridge.ops.registry import vocabulary


@dataclass(frozen=True)
class Roles:
    """Which node is what; `add` is None where nothing is added."""

    add: Node | None
    update: Node
    norm: Node


class FuseAttnResNorm(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_attn_res_norm"
    needs: ClassVar[tuple[str, ...]] = ("fuse_attn_res", "fuse_rms_norm")

    def expect(self, config: ModelShape, phase: str) -> int:
        # Two sites a layer, less layer 0's attention: it has one source and no stage two.
        return 0 if config.attn_res_block_size is None else 2 * len(config.layer_kinds) - 1

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        for update in list(context.graph.nodes):
            if op_name(update) != "hybridge::attn_res_update":
                continue
            norm = next((user for user in update.users if _normalises(user, update)), None)
            if norm is not None:
                yield _site(context, update, norm)

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        return None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        roles: Roles = site.detail
        prefix, *rest = roles.update.args
        attributes = {**roles.update.kwargs, "norm_eps": roles.norm.kwargs["eps"]}
        weight = roles.norm.args[1]
        if roles.add is None:
            op = vocabulary["attn_res_update_norm"].overload
            return {roles.norm: rewriter.call(op, prefix, *rest, weight, **attributes)}
        op = vocabulary["attn_res_add_update_norm"].overload
        operands = sorted(roles.add.all_input_nodes)
        both = rewriter.call(op, operands[0], operands[-1], *rest, weight, **attributes)
        return {roles.add: rewriter.item(both, 0), roles.norm: rewriter.item(both, 1)}


def _normalises(user: Node, update: Node) -> bool:
    return op_name(user) == "hybridge::rms_norm" and user.args[0] is update


def _site(context: PassContext, update: Node, norm: Node) -> Site:
    """The site with its add, or without it where the add has to stay."""
    bare = Site(
        update, regions.make_region([update, norm], [norm]), detail=Roles(None, update, norm)
    )
    prefix = update.args[0]
    if not isinstance(prefix, Node) or not _is_residual_add(prefix):
        return bare
    region = regions.make_region([prefix, update, norm], [prefix, norm])
    whole = Site(update, region, detail=Roles(prefix, update, norm))
    return bare if hazard(whole, context) and not hazard(bare, context) else whole


def _is_residual_add(node: Node) -> bool:
    """Whether a node is the sum of two tensors like it."""
    if op_name(node) != "aten::add" or node.kwargs or len(node.args) != 2:
        return False
    return all(
        isinstance(each, Node)
        and same_shape(shape_of(each) or (), shape_of(node) or ())
        and dtype_of(each) == dtype_of(node)
        for each in node.args
    )
