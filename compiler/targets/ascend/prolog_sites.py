"""Where a fused graph has what npu_mla_prolog_v3 computes: an MLA layer's queries and its cache row.

    c   = rms_norm(x Wqa^T)                        query_norm ─┐ (the indexer reads it)
    q   = c Wqb^T -> [T, H, nope | rope]                       │
    row = [rms_norm(kv[:, :C]) | kv[:, C:]], kv = x Wkva^T     ├─ one operator
    paged_write(latent cache, row)                             │
    [q_nope Wuk | q_rope] -> an attention op       query ──────┘

Found from the attention op that reads the query. The operator rotates; these models do not, which cosines
of 1 and sines of 0 say exactly. Left alone, with a reason: a query without a low-rank latent, a query or
row that someone else reads, a rotation, a read of the cache before its write.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import Node

from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import Refusal
from hybridge.ir.pattern import projection
from hybridge.ir.signature import is_weight
from hybridge.ops.registry import find

RULE = "fuse_mla_prolog"
_ATTENTION = ("sparse_flash_attention", "mla_attention")


@dataclass(frozen=True)
class PrologSite:
    """One layer's prolog.

    Attributes:
        members: the nodes that one operator replaces, in program order.
        query: the absorbed query [T, H, C + rope], which the attention op reads.
        latent: c [T, rank]; whether someone besides the queries reads it says `latent_is_read`.
        write: the paged_write of the latent cache.
        x, cache, slot_mapping: what it reads.
        query_down, query_gamma, query_up, cache_down, cache_gamma: weights.
        key_up: the whole weight [H (nope + v), C] of which each head's first `nope` rows absorb the query.
        heads, nope: of the query. query_eps, cache_eps: of the norms.
        latent_is_read: see `latent`.
    """

    members: tuple[Node, ...]
    query: Node
    latent: Node
    write: Node
    x: Node
    cache: Node
    slot_mapping: Node
    query_down: Node
    query_gamma: Node
    query_up: Node
    cache_down: Node
    cache_gamma: Node
    key_up: Node
    heads: int
    nope: int
    query_eps: float
    cache_eps: float
    latent_is_read: bool


class _NoSiteError(Exception):
    """Why a layer is none."""


def prolog_sites(gm: fx.GraphModule) -> Iterator[PrologSite | Refusal]:
    """Every attention op's prolog, or why it has none."""
    for node in gm.graph.nodes:
        op = find(node.target)
        if op is not None and op.name in _ATTENTION:
            try:
                yield _site(node)
            except _NoSiteError as error:
                yield Refusal(
                    node.name,
                    "mla prolog",
                    str(error),
                    "none: the parts stay operators of their own",
                )


def _site(attention: Node) -> PrologSite:
    query, cache = _node(attention.args[0]), _node(attention.args[1])
    absorbed, rope = _cat(query)
    plain, key = _absorption(absorbed)
    halves = _halves(plain, rope)
    per_head = _called(_node(halves.args[0]), "aten::unflatten")
    up = _projection(_node(per_head.args[0]))
    latent = up.x
    norm = _called(latent, "hybridge::rms_norm")
    down = _projection(_node(norm.args[0]))
    write = _write(cache, attention)
    row = _row(write, down.x)
    whole_key = _key_weight(key)
    members = {query, absorbed, halves, plain, rope, per_head, up.node, latent, down.node}
    members |= {write, *row.members}
    site = PrologSite(
        tuple(sorted(members)),
        query,
        latent,
        write,
        down.x,
        cache,
        _node(write.args[2]),
        down.weight,
        _node(norm.args[1]),
        up.weight,
        row.down,
        row.gamma,
        whole_key,
        heads=int(per_head.meta["val"].shape[1]),
        nope=int(plain.meta["val"].shape[2]),
        query_eps=float(norm.kwargs["eps"]),  # type: ignore[arg-type]
        cache_eps=row.eps,
        latent_is_read=any(user not in members for user in latent.users),
    )
    _nobody_else(site, members)
    _cache_is_untouched(site, attention)
    return site


@dataclass(frozen=True)
class _Row:
    members: tuple[Node, ...]
    down: Node
    gamma: Node
    eps: float


def _row(write: Node, x: Node) -> _Row:
    """The cache row: [norm of the latent part | rope part] of one projection of the same input."""
    rows = _called(_node(write.args[1]), "aten::unsqueeze")
    normed, rope = _cat(_node(rows.args[0]))
    norm = _called(normed, "hybridge::rms_norm")
    part = _node(norm.args[0])
    halves = _halves(part, rope)
    down = _projection(_node(halves.args[0]))
    if down.x is not x:
        raise _NoSiteError(f"{down.node.name} projects another input than {x.name}")
    members = (rows, _node(rows.args[0]), normed, part, rope, halves, down.node)
    return _Row(members, down.weight, _node(norm.args[1]), float(norm.kwargs["eps"]))  # type: ignore[arg-type]


def _write(cache: Node, attention: Node) -> Node:
    found = [
        user
        for user in cache.users
        if op_name(user) == "hybridge::paged_write" and user < attention and user.args[0] is cache
    ]
    if len(found) != 1:
        raise _NoSiteError(f"{cache.name} is written {len(found)} times before {attention.name}")
    return found[0]


def _absorption(node: Node) -> tuple[Node, Node]:
    einsum = _called(node, "aten::einsum")
    equation = str(einsum.args[0]).replace(" ", "")
    if equation != "thn,hnc->thc":
        raise _NoSiteError(f"{node.name} is not the absorption thn,hnc->thc but {equation}")
    plain, key = tuple(einsum.args[1])  # type: ignore[arg-type]
    return _node(plain), _node(key)


def _key_weight(key: Node) -> Node:
    """The weight whose first rows of each head `key` is."""
    if key.target is not operator.getitem or key.args[1] != 0:
        raise _NoSiteError(f"{key.name} is not the first part of a head's rows")
    split = _called(_node(key.args[0]), "aten::split_with_sizes")
    if split.args[2:] != (1,):
        raise _NoSiteError(f"{split.name} does not split rows of heads")
    heads = _called(_node(split.args[0]), "aten::unflatten")
    weight = _node(heads.args[0])
    if not is_weight(weight) or heads.args[1] != 0:
        raise _NoSiteError(f"{heads.name} is not a weight by heads")
    return weight


def _halves(first: Node, second: Node) -> Node:
    """The split along the last axis that two values are the two parts of, in order."""
    for place, part in enumerate((first, second)):
        if part.target is not operator.getitem or part.args[1] != place:
            raise _NoSiteError(f"{part.name} is not part {place} of a split")
    split = _called(_node(first.args[0]), "aten::split_with_sizes")
    axes = (-1, len(split.args[0].meta["val"].shape) - 1)  # type: ignore[union-attr]
    if second.args[0] is not split or split.args[2] not in axes or len(split.args[1]) != 2:  # type: ignore[arg-type]
        raise _NoSiteError(f"{first.name} and {second.name} are not two parts of one split")
    return split


def _cat(node: Node) -> tuple[Node, Node]:
    parts = _called(node, "aten::cat").args
    axes = (-1, len(node.meta["val"].shape) - 1)
    if len(parts) < 2 or parts[1] not in axes or len(parts[0]) != 2:  # type: ignore[arg-type]
        raise _NoSiteError(f"{node.name} does not join two parts along the last axis")
    first, second = tuple(parts[0])  # type: ignore[arg-type]
    return _node(first), _node(second)


def _projection(node: Node) -> Any:
    found = projection(node)
    if found is None:
        raise _NoSiteError(f"{node.name} is not a projection by a weight")
    return found


def _called(node: Node, name: str) -> Node:
    if op_name(node) != name:
        raise _NoSiteError(f"{node.name} is {op_name(node)}, not {name}")
    return node


def _node(value: Any) -> Node:
    if not isinstance(value, Node):
        raise _NoSiteError(f"{value!r} is not computed")
    return value


def _nobody_else(site: PrologSite, members: set[Node]) -> None:
    for node in site.members:
        if node in (site.query, site.latent):
            continue
        stranger = next((user for user in node.users if user not in members), None)
        if stranger is not None:
            raise _NoSiteError(f"{stranger.name} reads {node.name} too")
    for user in site.query.users:
        op = find(user.target)
        if op is None or op.name not in _ATTENTION:
            raise _NoSiteError(f"{user.name} reads the query {site.query.name} too")


def _cache_is_untouched(site: PrologSite, attention: Node) -> None:
    """Nobody may read or write the cache between the first member and the write."""
    for user in site.cache.users:
        if user is not site.write and site.members[0] < user < attention:
            raise _NoSiteError(f"{user.name} uses {site.cache.name} before {attention.name}")
