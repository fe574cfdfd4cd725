"""The MLA prolog: queries, their absorption and the cache row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.npu_reference.basic import rms_norm
from hybridge.compiler.targets.ascend.npu_reference.numbers import wide


def _rotate(x: Tensor, sines: Tensor, cosines: Tensor) -> Tensor:
    """Rotary embedding of [T, ..., D], halves against each other."""
    shape = (x.shape[0], *[1] * (x.dim() - 2), x.shape[-1])
    first, second = wide(x).chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return wide(x) * wide(cosines).view(shape) + turned * wide(sines).view(shape)


def mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    cache_index: Tensor,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    query_norm_flag: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(query [T, N, Hckv], its rope part [T, N, Dr], -, normed latent [T, Hcq] or empty, -).

    c = rms(x Wdq); q = c Wuq_qr, of each head D columns plain, Dr rotated; query = plain Wuk; the
    cache rows cache_index become rms(x Wdkv) and the rotated x Wkr, in place. Weights are [in, out],
    unquantised, T and H not split. Source: hicann/ops-transformer attention/mla_prolog_v3/docs.
    """
    if cache_mode != "PA_BSND" or token_x.dim() != 2:
        raise NotImplementedError("reference of [T, He] tokens and PA_BSND caches only")
    heads, plain, latent = weight_uk.shape
    down = (wide(token_x) @ wide(weight_dq)).to(token_x.dtype)
    normed = rms_norm(down, rmsnorm_gamma_cq, rmsnorm_epsilon_cq)[0]
    full = (wide(normed) @ wide(weight_uq_qr)).to(token_x.dtype).unflatten(-1, (heads, -1))
    query = torch.einsum("tnd,ndc->tnc", wide(full[..., :plain]), wide(weight_uk))
    rope = _rotate(full[..., plain:], rope_sin, rope_cos)
    row = (wide(token_x) @ wide(weight_dkv_kr)).to(token_x.dtype)
    key = rms_norm(row[:, :latent], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)[0]
    key_rope = _rotate(row[:, latent:], rope_sin, rope_cos)
    for cache, rows in ((kv_cache, key), (kr_cache, key_rope)):
        if int(cache_index.min()) < 0 or int(cache_index.max()) >= cache.shape[0] * cache.shape[1]:
            raise IndexError(f"npu_mla_prolog_v3: cache_index {cache_index.tolist()}")
        cache.view(-1, cache.shape[-1])[cache_index] = rows.to(cache.dtype)
    nothing = token_x.new_empty(0)
    return (
        query.to(token_x.dtype).contiguous(),
        rope.to(token_x.dtype).contiguous(),
        nothing,
        normed if query_norm_flag else nothing.clone(),
        nothing.clone(),
    )


REFERENCES: dict[str, Callable[..., Any]] = {"npu::npu_mla_prolog_v3": mla_prolog_v3}
