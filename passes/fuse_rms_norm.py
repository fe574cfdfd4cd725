"""Fuse an RMS norm, decomposed or whole.

Before:                                                  After:
    y = x * rsqrt(mean(x^2, -1) + eps) * weight              y = rms_norm(x, weight, eps=…)

A site is found from its root, or from torch's own rms_norm. Trials prove it on ordinary and on tiny values, where eps
decides.

Left alone: a norm whose result has another dtype than its input (a bf16 input times an fp32 weight: the op would round,
vllm 48324); a root that someone else reads; a norm over another axis; L2 norms, which have no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.effects import op_name
from hybridge.ir.evaluate import Sizes
from hybridge.ir.layout import MOVEMENT
from hybridge.ir.pass_base import (
    ModelShape,
    Pass,
    PassContext,
    Refusal,
    Rewriter,
    Site,
)
from hybridge.ir.pattern import guards, is_like, promotion
from hybridge.ir.proof import Trial, Verdict, prove
from hybridge.ir.signature import dtype_of, is_weight, shape_of
from hybridge.ops.registry import vocabulary

_WHOLE = "aten::rms_norm"
_ROOTS = (_WHOLE, "aten::rsqrt", "aten::sqrt", "aten::pow")
# What turns x into its mean square: sums come first, seen from the root.
_SUMS = ("aten::mean", "aten::sum", "aten::einsum", "aten::linalg_vector_norm", _WHOLE)
_STATISTIC = MOVEMENT.union(
    _SUMS,
    (f"aten::{name}" for name in ("add", "mul", "div", "to", "square", "pow")),
    (f"aten::{name}" for name in ("sqrt", "rsqrt", "reciprocal", "clamp", "clamp_min")),
)
_SIZE = 3
_LARGEST = 16
_TOLERANCE = 1e-5
# One unit of bf16: the product may be rounded in another order.
_NARROW_TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class Roles:
    """Which node is what."""

    x: Node
    weight: Node
    end: Node
    eps: float


class FuseRmsNorm(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_rms_norm"

    def expect(self, config: ModelShape, phase: str) -> int:
        # Two sublayer norms a layer and the final one; a layer has more of its own.
        return 2 * len(config.layer_kinds) + 1

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        for node in list(context.graph.nodes):
            if op_name(node) in _ROOTS and not node._erased:
                found = _site(context, node)
                if found is not None:
                    yield found

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        roles, verdict = site.detail
        if not verdict.holds:
            refusal: Refusal = verdict.refusal(site.anchor, "rms_norm")
            return refusal
        return promotion(site.anchor, roles.x, roles.end)

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        roles: Roles = site.detail[0]
        norm = rewriter.call(vocabulary["rms_norm"].overload, roles.x, roles.weight, eps=roles.eps)
        return {roles.end: norm}


def _site(context: PassContext, root: Node) -> Site | None:
    """The norm around a root; None if there is no statistic of one tensor and one weight.

    Of several that are proved (with a cast inside or outside), one whose dtypes agree is taken.
    """
    best: tuple[Roles, Verdict] | None = None
    for x in _inputs(root):
        for end in (node for node in regions.forward([root], limit=8) if is_like(node, x)):
            found = _roles(context, root, x, end)
            if found is not None and (best is None or _preference(found) > _preference(best)):
                best = found
    if best is None:
        return None
    nodes = regions.cone([best[0].end], {best[0].x, best[0].weight}, context.effects)
    return Site(root, regions.make_region(nodes, [best[0].end]), detail=best)


def _preference(found: tuple[Roles, Verdict]) -> tuple[object, ...]:
    roles, verdict = found
    same_dtype = dtype_of(roles.x) == dtype_of(roles.end)
    return verdict.holds, same_dtype, verdict.rank


def _inputs(root: Node) -> Iterator[Node]:
    """The tensor whose statistic is under the root: where the chain of single inputs starts, or forks."""
    node = root
    means = False
    for _ in range(12):
        tensors = _activations(node)
        if op_name(node) not in _STATISTIC or len(tensors) != 1:
            break
        means = means or op_name(node) in _SUMS
        node = tensors[0]
        if means:
            yield node


def _activations(node: Node) -> list[Node]:
    """The tensors that a node is made from, without torch's own norm's weight."""
    tensors = [each for each in node.all_input_nodes if shape_of(each) is not None]
    return tensors[:1] if op_name(node) == _WHOLE else tensors


def _roles(context: PassContext, root: Node, x: Node, end: Node) -> tuple[Roles, Verdict] | None:
    """The proof with the end's one weight, or None if there is not one."""
    width = (shape_of(x) or (0,))[-1]
    nodes = regions.cone_within([end], min(x, root), context.effects)
    inside = [node for node in nodes if node is not x]
    weights = {each for node in inside for each in node.all_input_nodes if is_weight(each)}
    if len(weights) != 1:
        return None
    weight = weights.pop()
    if shape_of(weight) != (width,):
        return None
    region = regions.cone([end], {x, weight}, context.effects)
    if len(region) > _LARGEST or regions.open_input(region) is not None:
        return None
    best: tuple[Roles, Verdict] | None = None
    for eps in _epsilons(region):
        roles = Roles(x, weight, end, eps)
        verdict = prove(
            context,
            f"rms_norm {eps!r}",
            [end],
            [x, weight],
            lambda roles=roles: _trials(roles),  # type: ignore[misc]
            tolerance=_TOLERANCE if dtype_of(end) == torch.float32 else _NARROW_TOLERANCE,
        )
        if best is None or verdict.rank > best[1].rank:
            best = (roles, verdict)
    return best


def _epsilons(region: Sequence[Node]) -> list[float]:
    """What may be added in the root; torch's own norm has a default."""
    whole = [node for node in region if op_name(node) == _WHOLE]
    default = [torch.finfo(dtype_of(node) or torch.float32).eps for node in whole]
    return [*guards(region), *default]


def _trials(roles: Roles) -> Iterator[tuple[Trial, Sizes]]:
    for rule, magnitude in (
        ("x * rsqrt(mean(x^2) + eps) * weight", 1.0),
        ("eps is inside the root", 3e-3),
    ):
        sizes = Sizes()
        for place, size in enumerate(shape_of(roles.x) or ()):
            sizes.bind(size, _SIZE + place)
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(sizes.shape(roles.x), generator=generator) * magnitude
        weight = torch.randn(sizes.shape(roles.weight), generator=generator)
        given: dict[Node, Tensor] = {
            roles.x: x.to(dtype_of(roles.x)),
            roles.weight: weight.to(dtype_of(roles.weight)),
        }
        expected = vocabulary["rms_norm"].reference(
            given[roles.x].float(), given[roles.weight].float(), eps=roles.eps
        )
        yield Trial(rule, given, [expected.to(dtype_of(roles.end))]), sizes
