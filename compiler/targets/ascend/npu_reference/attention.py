"""The indexer and both forms of attention over paged caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.npu_reference.numbers import wide


def _queries(ends: Tensor, key_lengths: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(sequence, first token, one past its last token, keys) from prefix sums without the 0."""
    start = 0
    for row, (stop, keys) in enumerate(zip(ends.tolist(), key_lengths.tolist(), strict=True)):
        if stop < start:
            raise ValueError(f"TND wants prefix sums of the query lengths, got {ends.tolist()}")
        yield row, start, stop, keys
        start = stop


def _paged(cache: Tensor, table_row: Tensor, length: int) -> Tensor:
    """The first `length` rows [length, D] of a PA_BSND cache [blocks, block, 1, D]."""
    blocks = table_row[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 2)[:length]


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Top sparse_count keys by sum_h weights[t, h] relu(query[t, h] . key[s]), causal.

    TND queries with prefix sums, PA_BSND keys with lengths; [T, 1, sparse_count], best first, -1
    behind. Source: hicann/ops-transformer attention/lightning_indexer/README.md.
    """
    if (layout_query, layout_key, sparse_mode) != ("TND", "PA_BSND", 3):
        raise NotImplementedError("reference of TND queries, PA_BSND keys, rightDownCausal only")
    chosen = query.new_full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32)
    for row, start, stop, length in _queries(actual_seq_lengths_query, actual_seq_lengths_key):
        keys = wide(_paged(key, block_table[row], length))
        products = torch.einsum("thd,sd->ths", wide(query[start:stop]), keys).relu()
        scores = torch.einsum("ths,th->ts", products, wide(weights[start:stop]))
        for token in range(start, stop):
            seen = length - (stop - token) + 1
            order = scores[token - start, :seen].sort(stable=True, descending=True).indices
            kept = order[:sparse_count].int()
            chosen[token, 0, : len(kept)] = kept
    return chosen, query.new_empty(0)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    scores = scale * (wide(query) @ wide(keys).T)
    return (scores.softmax(-1) @ wide(values)).to(query.dtype)


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed MLA over the selected rows; the value is the key's latent part.

    A row of sparse_indices ends at its first -1. Source: torch_npu.npu_sparse_flash_attention,
    op-plugin documentation; hicann/ops-transformer attention/sparse_flash_attention.
    """
    if (layout_query, layout_kv, attention_mode) != ("TND", "PA_BSND", 2) or sparse_mode != 3:
        raise NotImplementedError("reference of TND, PA_BSND, MLA-absorb only")
    output = torch.zeros_like(query)
    for row, start, stop, length in _queries(actual_seq_lengths_query, actual_seq_lengths_kv):
        latent = _paged(key, block_table[row], length)
        keys = torch.cat([latent, _paged(key_rope, block_table[row], length)], -1)
        for token in range(start, stop):
            picks = sparse_indices[token, 0]
            ends = (picks < 0).nonzero()
            picks = picks[: int(ends[0])] if len(ends) else picks
            picks = picks[picks <= length - (stop - token)].long()
            if len(picks):
                full = torch.cat([query[token], query_rope[token]], -1)
                output[token] = _attend(full, keys[picks], latent[picks], scale_value)
    return output, query.new_empty(0), query.new_empty(0)


def paged_mla_attention(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    query_ends: Tensor,
    key_lengths: Tensor,
    block_table: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """Dense causal absorbed MLA; the value is the key's latent part.

    Source: torch_npu.npu_fused_infer_attention_score, op-plugin documentation (TND, block_table,
    query_rope and key_rope, sparse_mode 3 with the compressed 2048 x 2048 mask).
    """
    output = torch.zeros_like(query)
    for row, start, stop, length in _queries(query_ends, key_lengths):
        latent = _paged(key, block_table[row], length)
        keys = torch.cat([latent, _paged(key_rope, block_table[row], length)], -1)
        for token in range(start, stop):
            seen = length - (stop - token) + 1
            full = torch.cat([query[token], query_rope[token]], -1)
            output[token] = _attend(full, keys[:seen], latent[:seen], scale)
    return output


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu::npu_lightning_indexer": lightning_indexer,
    "npu::npu_sparse_flash_attention": sparse_flash_attention,
    "hybridge_ascend::paged_mla_attention": paged_mla_attention,
}
