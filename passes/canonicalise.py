"""Remove what computes nothing, so that later passes see the maths.

Removed: results that nobody uses; assertions about metadata; casts to the dtype that is there; slices, views,
    permutes and expands that change nothing; multiplication by one in the same dtype; dropout outside of
    training; copies (`clone`, `contiguous`) that separate nothing.

Left alone: a copy whose source or result is written later, or that is a graph output: it separates a read from a write
(pytorch 197829); a cast, multiplication or view that changes dtype or shape; anything that writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch.fx import Node

from hybridge.ir.effects import has_effect, is_assertion, op_name
from hybridge.ir.pass_base import Pass, PassContext, Refusal, Rewriter, Site, same_shape, same_size
from hybridge.ir.region import is_idle, make_region
from hybridge.ir.signature import dtype_of, shape_of, value_of

COPIES = ("aten::clone", "aten::contiguous", "aten::_to_copy")


def _source(node: Node) -> Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def _same_value(node: Node, source: Node) -> bool:
    """Whether shape and dtype are as they were."""
    left, right = shape_of(node), shape_of(source)
    return (
        left is not None
        and right is not None
        and same_shape(left, right)
        and dtype_of(node) == dtype_of(source)
    )


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _slices_nothing(node: Node, source: Node) -> bool:
    axis, start = _argument(node, 1, "dim", 0), _argument(node, 2, "start", None)
    step = _argument(node, 4, "step", 1)
    sizes, kept = shape_of(source), shape_of(node)
    if sizes is None or kept is None or start not in (0, None) or step != 1:
        return False
    return same_size(sizes[axis], kept[axis])


def _permutes_nothing(node: Node, source: Node) -> bool:
    order = [axis % len(node.args[1]) for axis in node.args[1]]  # type: ignore[arg-type,operator,union-attr]
    return order == sorted(order)


def _multiplies_by_one(node: Node, source: Node) -> bool:
    factor = _argument(node, 1, "other", None)
    return isinstance(factor, int | float) and factor == 1


def _not_training(node: Node, source: Node) -> bool:
    return _argument(node, 2, "train", True) is False


def _always(node: Node, source: Node) -> bool:
    return True


# Op -> what else must hold for it to change nothing, when shape and dtype are unchanged.
_NO_OPS: dict[str, Callable[[Node, Node], bool]] = {
    "aten::to": lambda node, _: not _copies(node),
    "aten::slice": _slices_nothing,
    "aten::view": _always,
    "aten::reshape": _always,
    "aten::expand": _always,
    "aten::flatten": _always,
    "aten::squeeze": _always,
    "aten::alias": _always,
    "aten::detach": _always,
    "aten::lift_fresh_copy": _always,
    "aten::permute": _permutes_nothing,
    "aten::mul": _multiplies_by_one,
    "aten::dropout": _not_training,
}


def _copies(node: Node) -> bool:
    """Whether a cast was told to copy even if there is nothing to cast."""
    schema = node.target._schema  # type: ignore[union-attr]
    place = next(i for i, argument in enumerate(schema.arguments) if argument.name == "copy")
    return bool(_argument(node, place, "copy", False))


class Canonicalise(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "canonicalise"

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        for node in reversed(list(context.graph.nodes)):
            if node.op == "call_function" and not node._erased and is_idle(node):
                yield Site(node, make_region([node], []))
        for node in list(context.graph.nodes):
            source = _source(node)
            if node.op != "call_function" or source is None or node._erased:
                continue
            if _is_noise(node, source):
                yield Site(node, make_region([node], [node]))

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        node, source = site.anchor, _source(site.anchor)
        if not site.region.outputs or source is None:
            return None
        if op_name(node) not in COPIES and not _shares_no_storage(node, source, context):
            return None
        return _separates(node, source, context)

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        source = _source(site.anchor)
        if not site.region.outputs or source is None:
            return {}
        return {site.anchor: source}


def _is_noise(node: Node, source: Node) -> bool:
    name = op_name(node)
    if has_effect(node) or is_assertion(node) or value_of(node) is None:
        return False
    if not _same_value(node, source):
        return False
    if name in COPIES:
        return True
    rule = _NO_OPS.get(name)
    return rule is not None and rule(node, source)


def _shares_no_storage(node: Node, source: Node, context: PassContext) -> bool:
    """Whether the node makes a tensor of its own (x * 1), so that dropping it makes an alias."""
    return not context.effects.roots(node) & context.effects.roots(source)


def _is_output(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _may_be_input(node: Node, context: PassContext) -> bool:
    return any(root.op != "call_function" for root in context.effects.roots(node))


def _separates(node: Node, source: Node, context: PassContext) -> Refusal | None:
    """Why a copy must stay: someone writes to one side of it, or the caller gets it."""
    for side, which in ((source, "source"), (node, "copy")):
        for write in context.effects.writes_to(side):
            if node < write:
                return Refusal(
                    node.name,
                    "copy separates a write",
                    f"{write.name} writes to the {which} of {node.name} afterwards",
                    "nothing: the copy is needed",
                )
    if _is_output(node) and (_is_output(source) or _may_be_input(source, context)):
        return Refusal(
            node.name,
            "copy is an output",
            f"{node.name} is a result of the graph and must not share storage with {source.name}",
            "nothing: the copy is needed",
        )
    return None
