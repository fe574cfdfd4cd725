"""In which type a graph reads each weight and cache: the narrow one where every reader takes it, else fp32.

Activations are fp32 on the CPU. A bf16 weight stays bf16 where it is read by an op that widens it on the way (a
matrix product), or by a lookup whose few rows are widened afterwards; no fp32 copy is ever resident. Any other
bf16 weight (norms, biases) is stored in fp32 by the compiler.

Where activations may be rounded, paged caches are bf16 by the same rule: half the memory, and half the bytes that
decoding reads of a long context. Recurrent states stay fp32: their rounding would add up over the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from hybridge.ir.derived import MOVES, Recipe
from hybridge.ir.signature import weight_name
from hybridge.ops import find

DTypes = Mapping[str, torch.dtype]

# The arguments in which ops take a paged cache of bf16.
_CACHE_ARGUMENTS = {
    "paged_write": "cache",
    "lightning_indexer": "indexer_cache",
    "sparse_flash_attention": "latent_cache",
    "mla_attention": "latent_cache",
}
_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_size.default)

# What the kernels (and the bodies) read in bf16.
_READS_BF16 = {
    "linear": ("weight",),
    "rms_norm": ("weight",),
    "kda_decode": ("in_weight", "f_b_weight", "g_b_weight", "o_weight"),
    "moe_route": ("gate_weight",),
    "moe_experts": ("gate_up", "down"),
    "mla_absorb_query": ("kv_b_weight",),
    "mla_expand_value": ("kv_b_weight",),
}


def weight_dtypes(graphs: Iterable[GraphModule], stored: DTypes) -> dict[str, torch.dtype]:
    """The type of each weight, the same in all phases.

    Args:
        graphs: the phases' graphs, as `lower_linear` leaves them.
        stored: the type of each weight in the checkpoint; one that is not named is fp32.

    Returns:
        For every weight that a graph reads.
    """
    found: dict[str, torch.dtype] = {}
    for gm in graphs:
        for node in weight_nodes(gm.graph):
            name = str(weight_name(node))
            recipes = gm.meta.get("derived_weights", {})
            wanted = _dtype(node, _stored(name, recipes, stored))
            found[name] = wanted if found.get(name, wanted) is wanted else torch.float32
    return found


def weight_nodes(graph: Graph) -> list[Node]:
    """The placeholders that are weights and that something reads."""
    return [
        node
        for node in graph.nodes
        if node.op == "placeholder" and weight_name(node) is not None and node.users
    ]


def set_weight_dtypes(gm: GraphModule, dtypes: DTypes) -> None:
    """Give the weights of `gm` these types, in place; a lookup's rows are widened after it."""
    for node in weight_nodes(gm.graph):
        dtype = dtypes[str(weight_name(node))]
        if dtype is node.meta["val"].dtype:
            continue
        node.meta["val"] = node.meta["val"].to(dtype)
        for user in list(node.users):
            if user.target is torch.ops.aten.embedding.default:
                _widen(user, gm.graph)


def narrow_caches(graphs: Iterable[GraphModule], paged: Iterable[str]) -> frozenset[str]:
    """The paged caches that every reader and writer of every phase takes in bf16.

    Args:
        graphs: the phases' graphs, before `functionalise`. paged: names of their paged caches.
    """
    placeholders = [
        {node.name: node for node in gm.graph.nodes if node.op == "placeholder"} for gm in graphs
    ]
    return frozenset(
        name
        for name in paged
        if all(
            _takes_bf16(user, nodes[name]) for nodes in placeholders for user in nodes[name].users
        )
    )


def set_cache_dtypes(gm: GraphModule, narrow: Iterable[str]) -> None:
    """Make these caches bf16, in place."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in narrow:
            node.meta["val"] = node.meta["val"].to(torch.bfloat16)


def _takes_bf16(user: Node, cache: Node) -> bool:
    if user.target in _SIZES:
        return True
    op = find(user.target)
    if op is None or op.name not in _CACHE_ARGUMENTS:
        return False
    place = op.tensor_arguments.index(_CACHE_ARGUMENTS[op.name])
    return [i for i, value in enumerate(user.args) if value is cache] == [place]


def _dtype(node: Node, stored: torch.dtype) -> torch.dtype:
    traced: torch.dtype = node.meta["val"].dtype
    if traced is not torch.float32 or stored is not torch.bfloat16:
        return traced
    return stored if all(_reads_bf16(user, node) for user in node.users) else traced


def _stored(name: str, recipes: Mapping[str, Recipe], stored: DTypes) -> torch.dtype:
    """The type of a weight, or the one that a derived weight can have without losing any bit."""
    if name not in recipes:
        return stored.get(name, torch.float32)
    recipe = recipes[name]
    inputs = {_stored(each, recipes, stored) for each in recipe["inputs"]}
    return inputs.pop() if len(inputs) == 1 and recipe["transform"] in MOVES else torch.float32


def _reads_bf16(user: Node, weight: Node) -> bool:
    if user.target is torch.ops.aten.embedding.default:
        return True
    op = find(user.target)
    if op is None or weight in user.kwargs.values():
        return False
    named = zip(op.tensor_arguments, user.args, strict=False)
    places = [name for name, value in named if value is weight]
    return all(name in _READS_BF16.get(op.name, ()) for name in places)


def _widen(lookup: Node, graph: Graph) -> None:
    value = lookup.meta["val"]
    with graph.inserting_after(lookup):
        wide = graph.call_function(torch.ops.aten._to_copy.default, (lookup,))
    lookup.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    wide.kwargs = {"dtype": value.dtype}
    wide.meta["val"] = value
    lookup.meta["val"] = value.to(torch.bfloat16)
