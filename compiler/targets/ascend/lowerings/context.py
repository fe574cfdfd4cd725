"""What the lowerings of one graph share: the bucket, broken constraints, values of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from hybridge.compiler.targets.ascend.constraints import Violation, violations
from hybridge.compiler.targets.ascend.expert_parallel import ExpertParallel
from hybridge.ops.registry import find


@dataclass(frozen=True)
class Bucket:
    """The sizes of one graph (names as in the graph signature).

    Attributes:
        tokens: T. sequences: B. blocks: N of a paged cache, without the null block.
        block_size: rows a block. columns: M of the block table.
        slots: recurrent states, without the null row. logits: L.
        dynamic: T, B, M and L stay open in the graph; what is said of them here is what estimates assume.
    """

    tokens: int
    sequences: int
    blocks: int
    block_size: int
    columns: int
    slots: int
    logits: int
    dynamic: bool = False


@dataclass
class PagedLatent:
    """A latent cache on the device: its two parts, wherever the last write left them."""

    latent: Tensor
    rope: Tensor


@dataclass(frozen=True)
class SplitQuery:
    """An absorbed query [T, padded heads, latent | rope] in two parts; `heads` of its heads count."""

    plain: Tensor
    rope: Tensor
    heads: int


@dataclass
class Context:
    """What lowerings share while one graph is traced.

    Attributes:
        soc: the target. dtype: of activations.
        parallel: this device's place among those that share the experts.
        violations: broken constraints so far.
        sites: see `Lowered`.
        node: the fused graph's node that is being lowered.
        values: the fused graph's node -> its value; a cache's is replaced when it is written.
        shared: what depends on the batch only and is computed once.
    """

    soc: str
    dtype: torch.dtype
    bucket: Bucket
    parallel: ExpertParallel = field(default_factory=ExpertParallel)
    violations: list[Violation] = field(default_factory=list)
    sites: dict[str, list[str]] = field(default_factory=dict)
    node: fx.Node | None = None
    values: dict[fx.Node, Any] = field(default_factory=dict)
    shared: dict[Any, Any] = field(default_factory=dict)

    def require(self, operator: str, **facts: object) -> None:
        """State facts (`head_dimension=128`) about an operator that is to be emitted."""
        named = {name.replace("_", " "): value for name, value in facts.items()}
        where = self.node.name if self.node is not None else "?"
        self.violations += violations(where, operator, self.soc, named)

    def became(self, operators: str) -> None:
        """Record what the current site became."""
        assert self.node is not None
        op = find(self.node.target)
        self.sites.setdefault(op.name if op else str(self.node.target), []).append(operators)

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """A value that is the same for all layers."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def argument(self, name: str) -> fx.Node:
        """The fused graph's node behind an argument of the current op."""
        assert self.node is not None
        op = find(self.node.target)
        assert op is not None
        place = op.tensor_arguments.index(name)
        found = self.node.kwargs.get(name)
        found = self.node.args[place] if found is None else found
        assert isinstance(found, fx.Node)
        return found

    def is_only_reader(self, name: str) -> bool:
        """Whether nobody but the current node reads the value of one of its arguments."""
        return set(self.argument(name).users) == {self.node}


def query_ends(ctx: Context, query_start: Tensor) -> Tensor:
    """Prefix sums without the leading 0: TND operators take these as query lengths."""
    return ctx.once("ends", lambda: query_start[1:].to(torch.int32))  # type: ignore[no-any-return]


def key_lengths(ctx: Context, query_start: Tensor, context_len: Tensor) -> Tensor:
    """Cached and new tokens of each sequence: a count, not a prefix sum."""

    def make() -> Tensor:
        new = query_start[1:] - query_start[:-1]
        return (context_len + new).to(torch.int32)

    return ctx.once("keys", make)  # type: ignore[no-any-return]


def continues(ctx: Context, context_len: Tensor, rank: int) -> Tensor:
    """[B, 1, ...] whether a sequence has cached tokens, for masks of `rank` dimensions."""

    def make() -> Tensor:
        return torch.gt(context_len, 0).view(-1, *[1] * (rank - 1))

    return ctx.once(("continues", rank), make)  # type: ignore[no-any-return]


def where_continuing(ctx: Context, context_len: Tensor, rows: Tensor) -> Tensor:
    """The state rows of sequences with cached tokens; zeros for those that start now."""
    zero = ctx.once(("zero", rows.dtype), lambda: rows.new_zeros(()))
    return torch.where(continues(ctx, context_len, rows.dim()), rows, zero)


def device_table(ctx: Context, block_table: Tensor) -> Tensor:
    """Block ids behind the null block; unused entries (-1) become the null block."""
    return ctx.once("table", lambda: (block_table + 1).clamp(min=0).to(torch.int32))  # type: ignore[no-any-return]


def device_slots(ctx: Context, state_slot: Tensor) -> Tensor:
    """State rows behind the null row, which inactive rows (-1) become."""
    return ctx.once("slots", lambda: (state_slot + 1).to(torch.int32))  # type: ignore[no-any-return]


def device_rows(ctx: Context, slot_mapping: Tensor) -> Tensor:
    """Cache rows [T, 1] behind the null block; tokens not to be cached are spread over it."""
    node = ctx.argument("slot_mapping")
    rows = device_rows_of(ctx, node, slot_mapping)
    return ctx.once(  # type: ignore[no-any-return]
        ("int32 rows", node.name), lambda: rows.to(torch.int32).unsqueeze(-1)
    )


def device_rows_of(ctx: Context, node: fx.Node, slot_mapping: Tensor) -> Tensor:
    """The same as int64 [T]; `node` is the graph's node of `slot_mapping`."""

    def make() -> Tensor:
        size = ctx.bucket.block_size
        nowhere = torch.arange(slot_mapping.shape[0], device=slot_mapping.device) % size
        return torch.where(slot_mapping < 0, nowhere, slot_mapping + size).to(torch.int64)

    return ctx.once(("rows", node.name), make)  # type: ignore[no-any-return]


def sequence_of(ctx: Context, tokens: int, query_start: Tensor) -> Tensor:
    """[T] the sequence of each token; a padding token gets the last one."""

    def make() -> Tensor:
        token = torch.arange(tokens, device=query_start.device).unsqueeze(1)
        return (token >= query_start[1:]).sum(1).clamp(max=query_start.shape[0] - 2)

    return ctx.once("sequence", make)  # type: ignore[no-any-return]


def matmul(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
    """X [..., K] times weight [N, K] transposed, in the activations' dtype."""
    return F.linear(x.to(ctx.dtype), weight.to(ctx.dtype))


def pad_heads(x: Tensor, heads: int) -> Tensor:
    """[T, H, D] -> [T, heads, D] with zero queries, whose output is dropped."""
    return x if x.shape[1] == heads else F.pad(x, (0, 0, 0, heads - x.shape[1]))


def scatter(cache: Tensor, rows: Tensor, updates: Tensor) -> Tensor:
    """Write rows of a cache in place; the result is the written cache."""
    flat = cache.view(-1, *cache.shape[2:])
    written: Tensor = torch.ops.npu.npu_scatter_nd_update_(flat, rows, updates.to(cache.dtype))
    return written.view(cache.shape)
