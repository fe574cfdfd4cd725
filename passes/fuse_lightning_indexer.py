"""Fuse the lightning indexer: score, head weighting, causal limit, top-k and the -1 tail, over paged keys.

Before:                                                  After:
    keys   = indexer_cache[block_table]                      positions = lightning_indexer(
    score  = sum_h weights[t, h] * relu(query . keys)            query, weights, indexer_cache,
    score  = -inf beyond the token's own position                query_start, context_len, block_table,
    order  = stable descending sort, first top_k                 top_k=k)
    result = visible ones, ascending, then -1

The site is found from its sort: whatever lies between the read of the cache and a [T, k] integer tensor. That
this is the indexer is proved by trials, so the order of ops, einsum or matmul, views and the way the mask is
made do not matter. The key gather and the score matrix disappear; the mask and the positions stay only if
something else uses them.

Left alone: a score, a mask or an order that someone else reads; a write to the cache between the read and the
result; a sort that is not stable (ties have no order); a mask that is not exactly the causal limit of the
batch; top-k padded with anything but -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.batch import (
    FIRST_BATCH,
    VARIED_BATCHES,
    Batch,
    batch_shape,
    batches,
    bind_sizes,
)
from hybridge.ir.effects import op_name
from hybridge.ir.evaluate import Sizes
from hybridge.ir.layout import Operand, operands
from hybridge.ir.pass_base import ModelShape, Pass, PassContext, Refusal, Rewriter, Site
from hybridge.ir.proof import MetadataOnly, Trial, Verdict, prove
from hybridge.ir.signature import (
    BLOCK_TABLE,
    CONTEXT_LEN,
    DECODE,
    QUERY_START,
    dtype_of,
    is_integer,
    is_weight,
    metadata,
    shape_of,
)
from hybridge.ops.registry import vocabulary
from hybridge.ops.sequences import sequence_rows
from hybridge.passes.paged_reads import CacheRead, cache_reads, cache_values, real_rows

_TABLES = (QUERY_START, CONTEXT_LEN, BLOCK_TABLE)
SORTS = ("aten::sort", "aten::argsort", "aten::topk")
SOFTMAXES = ("aten::softmax", "aten::_softmax", "aten::exp")


@dataclass(frozen=True)
class Roles:
    """Which node is what."""

    cache: Node
    query: Operand
    head_weights: Operand
    end: Node
    top_k: int


class FuseLightningIndexer(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_lightning_indexer"

    def expect(self, config: ModelShape, phase: str) -> int:
        return config.layer_kinds.count("dsa")

    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        decided = MetadataOnly(context)
        for read in list(cache_reads(context, SORTS, SOFTMAXES)):
            yield _site(context, read, decided)

    def check(self, site: Site, context: PassContext) -> Refusal | None:
        verdict: Verdict = site.detail[1]
        if not verdict.holds:
            return verdict.refusal(site.anchor, "lightning_indexer")
        roles: Roles = site.detail[0]
        if dtype_of(roles.head_weights.node) != torch.float32:
            return Refusal(
                site.anchor.name,
                "fp32 head weights",
                f"{roles.head_weights.node.name} is {dtype_of(roles.head_weights.node)}",
                "compute the head weights in fp32: narrower ones change the ranking near ties",
            )
        return None

    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        roles: Roles = site.detail[0]
        inputs = metadata(rewriter.context.graph)
        positions = rewriter.call(
            vocabulary["lightning_indexer"].overload,
            roles.query.emit(rewriter),
            roles.head_weights.emit(rewriter),
            roles.cache,
            *(inputs[name] for name in _TABLES),
            top_k=roles.top_k,
        )
        dtype = dtype_of(roles.end)
        if dtype != torch.int32:
            positions = rewriter.call(torch.ops.aten.to.dtype, positions, dtype)
        return {roles.end: positions}


def _site(context: PassContext, read: CacheRead, decided: MetadataOnly) -> Site | Refusal:
    """The best region that is proved (see `_best_proved`); else the nearest miss."""
    missing = [name for name in _TABLES if name not in metadata(context.graph)]
    if missing:
        reason = f"the graph has no input {missing[0]}"
        return Refusal(read.anchor.name, "batch metadata", reason, f"give the graph {missing[0]}")
    tried = [
        (roles, prove_indexer(context, roles))
        for end in _ends(read)
        for roles in _roles(context, read, end, decided)
    ]
    best = _best_proved(context, read, tried)
    if best is None:
        return Refusal(
            read.anchor.name,
            "indexer operands",
            f"between {read.reads[0].name} and {read.anchor.name} there are not one query [T, H, D] and one "
            "head weight [T, H] beside the keys",
            "score keys as sum_h weight[t, h] * relu(query[t, h] . key[s])",
        )
    region = regions.between(read.reads, [best[0].end], context.effects)
    return Site(read.anchor, region, _reads(context, best[0]), detail=best)


def _reads(context: PassContext, roles: Roles) -> tuple[Node, ...]:
    tables = metadata(context.graph)
    given = (roles.query.node, roles.head_weights.node, roles.cache)
    return (*given, *(tables[name] for name in _TABLES))


def _best_proved(
    context: PassContext, read: CacheRead, tried: list[tuple[Roles, Verdict]]
) -> tuple[Roles, Verdict] | None:
    """The largest proved region; else the nearest miss; None if nothing was tried.

    With a top-k of one a token never has an empty place, so what attention makes of the positions (a clamp, say)
    equals them too. It is told apart by the padding tokens' rows, which should be -1, and by who looks inside.
    """
    proved = [each for each in tried if each[1].holds]
    if len(proved) > 1:
        whole = [
            each for each in proved if prove_indexer(context, each[0], with_padding=True).holds
        ]
        proved = whole or proved
        closed = [each for each in proved if _is_closed(context, read, each[0].end)]
        proved = closed or proved
    if proved:
        return proved[-1]
    return max(reversed(tried), key=lambda each: each[1].rank, default=None)


def _is_closed(context: PassContext, read: CacheRead, end: Node) -> bool:
    """Whether nothing else uses what lies between the read and `end`."""
    region = regions.between(read.reads, [end], context.effects)
    return regions.escapes(region) is None


def indexed_positions(context: PassContext, decided: MetadataOnly) -> set[Node]:
    """Nodes that hold just what the op gives, fused or not: ascending, distinct, causal positions, then -1."""
    found = {node for node in context.graph.nodes if op_name(node) == "hybridge::lightning_indexer"}
    if any(name not in metadata(context.graph) for name in _TABLES):
        return found
    for read in cache_reads(context, SORTS, SOFTMAXES):
        for end in _ends(read):
            candidates = _roles(context, read, end, decided)
            if any(prove_indexer(context, roles).holds for roles in candidates):
                found.add(end)
    return found


def _ends(read: CacheRead) -> list[Node]:
    """[T, k] integer tensors that are made from the sort and nothing but integers after it."""
    found = []
    pending, seen = [read.anchor], {read.anchor}
    while pending:
        for user in pending.pop().users:
            if user in seen or not _is_integer_step(user):
                continue
            seen.add(user)
            pending.append(user)
            shape = shape_of(user)
            if shape is not None and len(shape) == 2 and isinstance(shape[1], int):
                found.append(user)
    kept = [node for node in found if dtype_of(node) in (torch.int32, torch.int64)]
    return sorted(kept)


def _is_integer_step(node: Node) -> bool:
    if node.op != "call_function" or op_name(node).startswith("hybridge::"):
        return False
    return op_name(node) in (*SORTS, "getitem") or is_integer(node)


def _roles(
    context: PassContext, read: CacheRead, end: Node, decided: MetadataOnly
) -> Iterator[Roles]:
    """Every way to see the region's inputs as a query and head weights; the trials decide."""
    region = regions.between(read.reads, [end], context.effects)
    floats = [
        node
        for node in region.inputs
        if node is not read.cache and not is_integer(node) and not decided(node)
    ]
    cache_shape, end_shape = shape_of(read.cache), shape_of(end)
    if len(floats) != 2 or cache_shape is None or end_shape is None:
        return
    tokens, width = end_shape[0], cache_shape[3]
    for first, second in (floats, floats[::-1]):
        if is_weight(first) or is_weight(second):
            continue
        for query in operands(first, (tokens, None, width)):
            heads = (shape_of(query.node) or ())[query.axes[1]]
            for weights in operands(second, (tokens, heads)):
                yield Roles(read.cache, query, weights, end, end_shape[1])


def prove_indexer(context: PassContext, roles: Roles, with_padding: bool = False) -> Verdict:
    """Whether the region from `roles` to `roles.end` is `lightning_indexer` on every kind of batch.

    Args:
        with_padding: the rows of padding tokens must agree as well.
    """
    inputs = metadata(context.graph)
    given = [roles.query.node, roles.head_weights.node, roles.cache, *inputs.values()]
    label = f"lightning_indexer {roles.top_k} {roles.query.axes} {roles.head_weights.axes}"
    if with_padding:
        label += " with padding"
    return prove(context, label, [roles.end], given, lambda: _trials(context, roles, with_padding))


@dataclass(frozen=True)
class _Values:
    """How a trial draws its numbers: whole ones, so that equal scores are exactly equal."""

    rule: str
    weights: tuple[int, int]
    scale: float = 1.0


_VALUES = (
    _Values("score is sum_h weight * relu(query . key)", (-3, 4)),
    _Values("equal scores go to the lowest position", (0, 1)),
    _Values("the mask is -inf, not a large number", (-1, 0), 2.0**17),
)


def _trials(
    context: PassContext, roles: Roles, with_padding: bool
) -> Iterator[tuple[Trial, Sizes]]:
    reference = vocabulary["lightning_indexer"].reference
    shape = batch_shape(context.graph, context.phase == DECODE, cache=roles.cache)
    for batch in batches(shape, reach=roles.top_k):
        for place, values in enumerate(_VALUES[: None if batch.name in VARIED_BATCHES else 1]):
            sizes = Sizes()
            given: dict[Node, Tensor] = bind_sizes(context.graph, batch, sizes)
            cache_shape = shape_of(roles.cache) or ()
            query_shape = [(shape_of(roles.query.node) or ())[axis] for axis in roles.query.axes]
            fits = sizes.bind(query_shape[0], batch.tokens)
            if not fits or not sizes.bind(cache_shape[0], batch.blocks):
                continue
            query, weights = _draw(batch, sizes.of(query_shape[1]), cache_shape[3], values, place)
            keys = cache_values(batch, cache_shape[3], place, whole=True)
            tables = batch.inputs()
            expected = reference(
                query,
                weights,
                keys,
                *(tables[name] for name in _TABLES),
                top_k=roles.top_k,
            )
            given[roles.query.node] = roles.query.to_node(query)
            given[roles.head_weights.node] = roles.head_weights.to_node(weights)
            given[roles.cache] = keys.clone()
            drawn = _Drawn(query, weights, keys, batch, roles.top_k)
            yield (
                Trial(
                    _rule(batch, values),
                    given,
                    [expected],
                    None if with_padding else real_rows(batch),
                    suspects=drawn.suspects,
                ),
                sizes,
            )


# What is often wrong with an indexer: (the rule, what the mistake changes).
_MISTAKES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a token sees its own position", {"reach": 0}),
    ("a token sees no position after its own", {"reach": 10**6}),
    ("relu comes before the head weights", {"relu": "after"}),
    ("scores are rectified by relu", {"relu": "none"}),
    ("equal scores go to the lowest position", {"lowest": False}),
    ("positions ascend", {"ascending": False}),
    ("the tail is -1", {"tail": 0}),
)


@dataclass(frozen=True)
class _Drawn:
    """The values of a trial, for telling which mistake a failing region makes."""

    query: Tensor
    weights: Tensor
    keys: Tensor
    batch: Batch
    top_k: int

    def suspects(self) -> Iterator[tuple[str, list[Tensor]]]:
        for rule, change in _MISTAKES:
            yield rule, [self._select(**change)]

    def _select(
        self,
        reach: int = 1,
        relu: str = "before",
        lowest: bool = True,
        ascending: bool = True,
        tail: int = -1,
    ) -> Tensor:
        result = torch.full((self.batch.tokens, self.top_k), tail, dtype=torch.int32)
        table = self.batch.tables()
        for token in range(self.batch.real_tokens):
            row = self.batch.sequence_of(token)
            length = self.batch.contexts[row] + self.batch.lengths[row]
            keys = sequence_rows(self.keys, table[row], length)
            score = self._score(token, keys, relu)[: self.batch.position_of(token) + reach]
            if not lowest:
                score = score.flip(0)
            order = torch.sort(score, descending=True, stable=True).indices[: self.top_k]
            if not lowest:
                order = len(score) - 1 - order
            kept = order.sort().values if ascending else order
            result[token, : len(kept)] = kept.to(torch.int32)
        return result

    def _score(self, token: int, keys: Tensor, relu: str) -> Tensor:
        products = self.query[token] @ keys.T
        if relu == "before":
            products = products.relu()
        score = self.weights[token] @ products
        return score.relu() if relu == "after" else score


def _draw(
    batch: Batch, heads: int, width: int, values: _Values, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randint(-2, 3, (batch.tokens, heads, width), generator=generator)
    low, high = values.weights
    weights = torch.randint(low, high, (batch.tokens, heads), generator=generator)
    return query.to(torch.float32), weights.to(torch.float32) * values.scale


def _rule(batch: Batch, values: _Values) -> str:
    """The first batch shows what the score is; later ones show what the batch adds to it."""
    if batch.name == FIRST_BATCH or values is not _VALUES[0]:
        return values.rule
    return f"positions on a batch with {batch.name}"
