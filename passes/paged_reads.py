"""What the fusions over paged caches share: finding reads of a cache, and values for trials."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.batch import Batch
from hybridge.ir.effects import op_name, schema_of, written_arguments
from hybridge.ir.pass_base import PassContext, same_size
from hybridge.ir.signature import dtype_of, is_weight, shape_of


@dataclass(frozen=True)
class CacheRead:
    """Plain reads of one paged cache that lead to one anchor.

    Args:
        cache: the input [blocks, block, 1, D].
        reads: the nodes that read it.
        anchor: the first node after them of the wanted kind.
    """

    cache: Node
    reads: tuple[Node, ...]
    anchor: Node


def is_paged_cache(node: Node) -> bool:
    """Whether an input has the form of a paged cache: [blocks, block, 1, D], floating point, no weight."""
    shape, dtype = shape_of(node), dtype_of(node)
    return (
        node.op == "placeholder"
        and not is_weight(node)
        and shape is not None
        and len(shape) == 4
        and same_size(shape[2], 1)
        and dtype is not None
        and dtype.is_floating_point
    )


def cache_reads(
    context: PassContext, anchors: Collection[str], others: Collection[str]
) -> Iterator[CacheRead]:
    """Reads of paged caches that meet an op of `anchors` before one of `others`, in program order."""
    for cache in context.graph.nodes:
        if cache.op != "placeholder":
            break
        if not is_paged_cache(cache):
            continue
        reads = [user for user in cache.users if _is_plain_read(user)]
        anchor = _first(reads, anchors, others)
        if anchor is not None:
            yield CacheRead(cache, tuple(read for read in reads if read < anchor), anchor)


def _is_plain_read(node: Node) -> bool:
    schema = schema_of(node)
    vocabulary = schema is not None and schema.name.startswith("hybridge::")
    return not vocabulary and not written_arguments(node) and node.op == "call_function"


def _first(reads: list[Node], anchors: Collection[str], others: Collection[str]) -> Node | None:
    for node in regions.forward(reads, limit=200) if reads else ():
        if op_name(node) in anchors:
            return node
        if op_name(node) in others:
            return None
    return None


def cache_values(batch: Batch, width: int, seed: int, whole: bool) -> Tensor:
    """A cache [blocks, block, 1, width] full of distinct rows; rows that no sequence owns are large.

    Args:
        whole: small whole numbers, so that sums of products are exact in fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch.blocks, batch.block, 1, width)
    if whole:
        cache = torch.randint(-2, 3, shape, generator=generator).to(torch.float32)
    else:
        cache = torch.randn(shape, generator=generator)
    owned = torch.zeros(batch.blocks, batch.block, dtype=torch.bool)
    table = batch.tables().long()
    for row, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
        for position in range(length + context):
            owned[table[row, position // batch.block], position % batch.block] = True
    return torch.where(owned[:, :, None, None], cache, 37.0)


def real_rows(batch: Batch) -> Tensor:
    """[T] bool: the tokens that are not padding."""
    return torch.arange(batch.tokens) < batch.real_tokens
