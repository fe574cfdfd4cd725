"""The paged caches, the indexer and both forms of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.constraints import padded_heads
from hybridge.compiler.targets.ascend.lowerings.context import (
    Context,
    PagedLatent,
    SplitQuery,
    device_rows,
    device_rows_of,
    device_table,
    key_lengths,
    pad_heads,
    query_ends,
    scatter,
)
from hybridge.compiler.targets.ascend.own_operators import ASCEND_950

# npu_fused_infer_attention_score wants this causal mask with sparse_mode 3, whatever the lengths.
MASK_SIZE = 2048


def lower_paged_write(ctx: Context, cache: Any, rows: Tensor, slot_mapping: Tensor) -> None:
    """One operator: both parts of a latent row at once; the null block takes what has no slot."""
    if isinstance(cache, PagedLatent):
        width = cache.latent.shape[-1]
        node = ctx.argument("slot_mapping")
        slots = device_rows_of(ctx, node, slot_mapping)
        torch.ops.npu.npu_scatter_pa_kv_cache(
            rows[..., :width].to(cache.latent.dtype).contiguous(),
            rows[..., width:].to(cache.rope.dtype).contiguous(),
            cache.latent,
            cache.rope,
            ctx.once(("int32 slots", node.name), lambda: slots.to(torch.int32)),
            cache_mode="Norm",
        )
        ctx.became("npu_scatter_pa_kv_cache")
        return
    where = device_rows(ctx, slot_mapping)
    ctx.values[ctx.argument("cache")] = scatter(cache, where, rows)
    ctx.became("npu_scatter_nd_update_")


def lower_lightning_indexer(
    ctx: Context,
    query: Tensor,
    head_weights: Tensor,
    indexer_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """npu_lightning_indexer; its rows come best first, which the attention does not mind."""
    weights_dtype = ctx.dtype if ctx.soc == ASCEND_950 else torch.float32
    ctx.require(
        "LightningIndexer",
        head_dimension=query.shape[-1],
        query_heads=query.shape[1],
        key_heads=indexer_cache.shape[2],
        block_size=indexer_cache.shape[1],
        sparse_count=top_k,
    )
    chosen, _ = torch.ops.npu.npu_lightning_indexer(
        query.to(ctx.dtype),
        indexer_cache,
        head_weights.to(weights_dtype),
        actual_seq_lengths_query=query_ends(ctx, query_start),
        actual_seq_lengths_key=key_lengths(ctx, query_start, context_len),
        block_table=device_table(ctx, block_table),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=top_k,
        sparse_mode=3,
    )
    ctx.became("npu_lightning_indexer")
    return chosen.squeeze(1)  # type: ignore[no-any-return]


def _split_query(ctx: Context, query: Tensor | SplitQuery, value_dim: int) -> SplitQuery:
    if isinstance(query, SplitQuery):
        return query
    padded = pad_heads(query.to(ctx.dtype), padded_heads(query.shape[1]))
    plain, rope = padded[..., :value_dim].contiguous(), padded[..., value_dim:].contiguous()
    return SplitQuery(plain, rope, query.shape[1])


def lower_sparse_flash_attention(
    ctx: Context,
    query: Tensor | SplitQuery,
    latent_cache: PagedLatent,
    positions: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> Tensor:
    """npu_sparse_flash_attention in MLA-absorb mode; heads are filled up to what it takes."""
    parts = _split_query(ctx, query, value_dim)
    plain, rope = parts.plain, parts.rope
    ctx.require(
        "SparseFlashAttention",
        query_heads=plain.shape[1],
        latent_dimension=value_dim,
        rope_dimension=rope.shape[-1],
        block_size=latent_cache.latent.shape[1],
    )
    output, _, _ = torch.ops.npu.npu_sparse_flash_attention(
        plain,
        latent_cache.latent,
        latent_cache.latent,
        positions.unsqueeze(1),
        scale,
        block_table=device_table(ctx, block_table),
        actual_seq_lengths_query=query_ends(ctx, query_start),
        actual_seq_lengths_kv=key_lengths(ctx, query_start, context_len),
        query_rope=rope,
        key_rope=latent_cache.rope,
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=3,
        attention_mode=2,
    )
    ctx.became("npu_sparse_flash_attention")
    return output[:, : parts.heads]  # type: ignore[no-any-return]


def lower_mla_attention(
    ctx: Context,
    query: Tensor | SplitQuery,
    latent_cache: PagedLatent,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    value_dim: int,
) -> Tensor:
    """FusedInferAttentionScore with paged keys and lengths as tensors."""
    parts = _split_query(ctx, query, value_dim)
    plain, rope = parts.plain, parts.rope
    ctx.require(
        "FusedInferAttentionScore",
        query_heads=plain.shape[1],
        latent_dimension=value_dim,
        rope_dimension=rope.shape[-1],
        block_size=latent_cache.latent.shape[1],
    )

    def make_mask() -> Tensor:
        ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=plain.device)
        return torch.triu(ones, 1)

    output = torch.ops.hybridge_ascend.paged_mla_attention(
        plain,
        latent_cache.latent,
        rope,
        latent_cache.rope,
        query_ends(ctx, query_start),
        key_lengths(ctx, query_start, context_len),
        device_table(ctx, block_table),
        ctx.once("mask", make_mask),
        scale,
    )
    ctx.became("FusedInferAttentionScore")
    return output[:, : parts.heads]  # type: ignore[no-any-return]
