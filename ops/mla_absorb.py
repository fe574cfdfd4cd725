"""`mla_absorb_query` and `mla_expand_value`: what absorbed MLA multiplies by kv_b_proj's weight, as it lies.

The weight [H (nope + value), C] holds head after head the rows W_UK, which make the head's keys of a latent row, and
below them the rows W_UV, which make its values (spec/MODELS.md 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridge.ops.registry import Constraint, FusedOp, register
from hybridge.ops.sequences import wide


def absorb_query_reference(query: Tensor, kv_b_weight: Tensor) -> Tensor:
    """query[t, h] W_UK[h], accumulated in fp32: the query in the space of the latent rows.

    The weight may be narrower than the query (bf16): it is used as stored.

    Args:
        query: [T, H, nope], without its rope part.
        kv_b_weight: [H (nope + value), C].

    Returns:
        [T, H, C] in the query's dtype.
    """
    key_up = _by_head(query, kv_b_weight)[:, : query.shape[2]]
    return torch.einsum("thn,hnc->thc", wide(query), key_up).to(query.dtype)


def absorb_query_fake(query: Tensor, kv_b_weight: Tensor) -> Tensor:
    return query.new_empty((*query.shape[:2], kv_b_weight.shape[1]))


def expand_value_reference(latent: Tensor, kv_b_weight: Tensor, *, value_dim: int) -> Tensor:
    """W_UV[h] latent[t, h], accumulated in fp32: values of what attention mixed of latent rows.

    Args:
        latent: [T, H, C].
        kv_b_weight: [H (nope + value), C]; a head's last `value_dim` rows are W_UV.

    Returns:
        [T, H, value_dim] in the latent's dtype.
    """
    by_head = _by_head(latent, kv_b_weight)
    value_up = by_head[:, by_head.shape[1] - value_dim :]
    return torch.einsum("thc,hvc->thv", wide(latent), value_up).to(latent.dtype)


def expand_value_fake(latent: Tensor, kv_b_weight: Tensor, *, value_dim: int) -> Tensor:
    return latent.new_empty((*latent.shape[:2], value_dim))


def _by_head(x: Tensor, kv_b_weight: Tensor) -> Tensor:
    """[H, nope + value, C] in the type that `x` is computed in."""
    return kv_b_weight.to(wide(x).dtype).reshape(x.shape[1], -1, kv_b_weight.shape[1])


_BY_HEAD = Constraint(
    "kv_b_weight", "a head's key rows stand before its value rows", "absorbed MLA (MODELS.md 4.2)"
)

MLA_ABSORB_QUERY = register(
    FusedOp(
        name="mla_absorb_query",
        signature="(Tensor query, Tensor kv_b_weight) -> Tensor",
        reference=absorb_query_reference,
        fake=absorb_query_fake,
        constraints=(_BY_HEAD,),
    )
)

MLA_EXPAND_VALUE = register(
    FusedOp(
        name="mla_expand_value",
        signature="(Tensor latent, Tensor kv_b_weight, *, int value_dim) -> Tensor",
        reference=expand_value_reference,
        fake=expand_value_fake,
        constraints=(_BY_HEAD,),
    )
)
