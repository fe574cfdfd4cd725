"""npu_mla_prolog_v3: queries, their absorption, and the cache row, in one operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from hybridge.compiler.targets.ascend.constraints import Violation, padded_heads, violations
from hybridge.compiler.targets.ascend.lowerings.context import (
    Context,
    PagedLatent,
    SplitQuery,
    device_rows_of,
)
from hybridge.compiler.targets.ascend.prolog_sites import PrologSite

OPERATOR = "MlaPrologV3"


def facts(site: PrologSite, block_size: int) -> dict[str, object]:
    """What the operator's rules ask about, heads filled up to what it takes."""
    rank, hidden = site.query_down.meta["val"].shape
    latent = site.cache_gamma.meta["val"].shape[0]
    return {
        "hidden size": int(hidden),
        "query rank": int(rank),
        "query heads": padded_heads(site.heads),
        "latent dimension": int(latent),
        "plain dimension": site.nope,
        "rope dimension": int(site.cache_down.meta["val"].shape[0] - latent),
        "block size": block_size,
    }


def broken_rules(site: PrologSite, soc: str, block_size: int) -> list[Violation]:
    """The operator's rules that a layer breaks; the layer then stays several operators."""
    return violations(site.query.name, OPERATOR, soc, facts(site, block_size))


def lower_mla_prolog(
    ctx: Context,
    site: PrologSite,
    read: Callable[[Node], Tensor],
    latent: PagedLatent,
    key_up: Tensor,
) -> Mapping[Node, object]:
    """Emit the operator; the values of the site's query, its latent and its cache.

    Args:
        site: the layer. read: node -> value. latent: the cache as the last write left it.
        key_up: the whole [H (nope + v), C] weight, as an input of its own, since only a part is read.
    """
    heads = padded_heads(site.heads)
    missing = heads - site.heads
    query_up = read(site.query_up).unflatten(0, (site.heads, -1))
    query_up = F.pad(query_up, (0, 0, 0, 0, 0, missing)) if missing else query_up
    keys = key_up.unflatten(0, (site.heads, -1))[:, : site.nope]
    keys = F.pad(keys, (0, 0, 0, 0, 0, missing)) if missing else keys
    x = read(site.x).to(ctx.dtype)
    shape = (x.shape[0], latent.rope.shape[-1])
    sines = ctx.once(("sines", shape[1]), lambda: x.new_zeros(shape))
    cosines = ctx.once(("cosines", shape[1]), lambda: x.new_ones(shape))
    query, query_rope, _, normed, _ = torch.ops.npu.npu_mla_prolog_v3(
        x,
        _transposed(ctx, read(site.query_down)),
        query_up.to(ctx.dtype).flatten(0, 1).t().contiguous(),
        keys.to(ctx.dtype).contiguous(),
        _transposed(ctx, read(site.cache_down)),
        read(site.query_gamma).to(ctx.dtype),
        read(site.cache_gamma).to(ctx.dtype),
        sines,
        cosines,
        latent.latent,
        latent.rope,
        cache_index=device_rows_of(ctx, site.slot_mapping, read(site.slot_mapping)),
        rmsnorm_epsilon_cq=site.query_eps,
        rmsnorm_epsilon_ckv=site.cache_eps,
        cache_mode="PA_BSND",
        query_norm_flag=site.latent_is_read,
    )
    ctx.sites.setdefault("mla_prolog", []).append("npu_mla_prolog_v3")
    return {
        site.query: SplitQuery(query, query_rope, site.heads),
        site.latent: normed,
        site.cache: latent,
    }


def _transposed(ctx: Context, weight: Tensor) -> Tensor:
    """[inputs, outputs], whole: the operator takes it in FRACTAL_NZ and as an allocation of its own."""
    return weight.to(ctx.dtype).t().contiguous()
