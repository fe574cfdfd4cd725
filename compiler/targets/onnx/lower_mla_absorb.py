"""The two products of absorbed MLA read kv_b_proj's weight as it is stored.

    einsum("thn,hnc->thc", q, key_up)      ->    mla_absorb_query(q, kv_b)
    einsum("thc,hvc->thv", x, value_up)    ->    mla_expand_value(x, kv_b, value_dim=V)

where key_up and value_up are the first and the last rows of each head of kv_b [H (nope + V), C], as the model cuts
them or as a pass derived them from expanded MLA. Otherwise both are stored anew, in fp32, as onnxruntime's products
want them. A weight that holds one of the two only (all heads' keys, say) is read in the same way.

Left alone, for `lower_einsum`: rows from the middle of a head, weights of three axes, other equations. Ascend has
operators of its own for these products (npu_mla_prolog) and never comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from hybridge.compiler.targets.onnx.lower_einsum import head_product
from hybridge.ir.derived import Recipe
from hybridge.ir.pass_base import fake_result
from hybridge.ir.signature import is_weight, weight_name


@dataclass(frozen=True)
class HeadRows:
    """Rows [start, stop) of each head of a weight [H * per_head, C]."""

    weight: Node
    start: int
    stop: int
    per_head: int


def lower_mla_absorb(gm: GraphModule) -> int:
    """Rewrite `gm`, of which `fold_weights` has made cut weights derived ones, in place.

    Returns:
        How many products were lowered.
    """
    recipes: Mapping[str, Recipe] = gm.meta.get("derived_weights", {})
    weights = {str(weight_name(node)): node for node in gm.graph.nodes if is_weight(node)}
    count = 0
    for node in list(gm.graph.nodes):
        product = head_product(node)
        if product is None or not is_weight(product.weight):
            continue
        rows = _head_rows(product.weight, recipes, weights)
        if rows is not None:
            count += _lower(node, product.x, rows, absorbs=product.sums_rows)
    return count


def _lower(node: Node, x: Node, rows: HeadRows, *, absorbs: bool) -> bool:
    in_place = rows.start == 0 if absorbs else rows.stop == rows.per_head
    if not in_place:
        return False
    node.args = (x, rows.weight)
    if absorbs:
        node.target = torch.ops.hybridge.mla_absorb_query.default
    else:
        node.target = torch.ops.hybridge.mla_expand_value.default
        node.kwargs = {"value_dim": rows.stop - rows.start}
    node.meta["val"] = fake_result(node)
    return True


def _head_rows(
    weight: Node, recipes: Mapping[str, Recipe], weights: Mapping[str, Node]
) -> HeadRows | None:
    """Of which weight's heads a derived weight [H, rows, C] is, or None."""
    recipe = recipes.get(str(weight_name(weight)))
    bounds: tuple[int, int] | None = None
    if recipe is not None and recipe["transform"] == "slice" and recipe["axis"] == 1:
        bounds = (recipe["start"], recipe["stop"])
        recipe = recipes.get(recipe["inputs"][0])
    if recipe is None or recipe["transform"] != "reshape" or len(recipe["shape"]) != 3:
        return None
    heads, per_head, columns = recipe["shape"]
    source = weights.get(recipe["inputs"][0])
    if source is None or tuple(source.meta["val"].shape) != (heads * per_head, columns):
        return None
    start, stop = bounds or (0, per_head)
    return HeadRows(source, start, stop, per_head)
