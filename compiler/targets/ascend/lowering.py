"""From the fused graph to a graph of npu operators, for one SoC and one bucket of static sizes.

The fused graph is run node by node on fake tensors of the bucket's sizes while torch traces what is
called: a vocabulary op runs the function that `LOWERINGS` has for it, everything else runs as it
is. The result has static shapes, bf16 activations, caches as the device wants them (see
`device_state.py`) and no cache copies: each write updates its input in place, and whatever reads
the cache afterwards reads the write's result, so that order is data.

Every operator's constraints are checked on the way; all that are broken are reported together.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.targets.ascend.choose_prologs import Prologs, choose_prologs
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.device_state import DeviceCache
from hybridge.compiler.targets.ascend.expert_parallel import (
    ExpertParallel,
    expert_weights,
    own_part,
)
from hybridge.compiler.targets.ascend.fit import DoesNotFitError
from hybridge.compiler.targets.ascend.fuse_add_rms_norm import fuse_add_rms_norm
from hybridge.compiler.targets.ascend.lowerings import attention, attn_res, elementwise, kda, moe
from hybridge.compiler.targets.ascend.lowerings.context import Bucket, Context, PagedLatent
from hybridge.compiler.targets.ascend.lowerings.mla_prolog import lower_mla_prolog
from hybridge.compiler.targets.ascend.mega_kda import mega_kda_result
from hybridge.compiler.targets.ascend.operators import define_operators
from hybridge.compiler.targets.ascend.own_operators import ASCEND_950
from hybridge.compiler.targets.ascend.prepared_weights import PreparedWeight, prepare_weights
from hybridge.compiler.targets.ascend.prolog_sites import PrologSite
from hybridge.compiler.targets.ascend.symbolic_sizes import OPEN_SIZES, Size, SymbolicSizes
from hybridge.ir.effects import is_assertion
from hybridge.ir.pass_base import PassResult
from hybridge.ir.signature import METADATA, weight_name
from hybridge.models.caches import CacheShape
from hybridge.ops.registry import find

LOWERINGS: dict[str, Callable[..., Any]] = {
    "paged_write": attention.lower_paged_write,
    "lightning_indexer": attention.lower_lightning_indexer,
    "sparse_flash_attention": attention.lower_sparse_flash_attention,
    "mla_attention": attention.lower_mla_attention,
    "kda_prefill": kda.lower_kda_prefill,
    "kda_decode": kda.lower_kda_decode,
    "attn_res_prepare": attn_res.lower_attn_res_prepare,
    "attn_res_update": attn_res.lower_attn_res_update,
    "attn_res_update_norm": attn_res.lower_attn_res_update_norm,
    "attn_res_add_update_norm": attn_res.lower_attn_res_add_update_norm,
    "moe_route": moe.lower_moe_route,
    "moe_experts": moe.lower_moe_experts,
    "moe_experts_mxfp4": moe.lower_moe_experts_mxfp4,
    "rms_norm": elementwise.lower_rms_norm,
    "linear": elementwise.lower_linear,
    "situ": elementwise.lower_situ,
}

# (packed weight, its scale) among the arguments of moe_experts_mxfp4
_MXFP4_PAIRS = ((3, 4), (5, 6))
_MATMULS = ("linear", "mm", "bmm", "matmul", "addmm", "einsum")


@dataclass(frozen=True)
class BatchInput:
    """One input that describes the batch: int32; an open size has a name (`symbolic_sizes.py`)."""

    name: str
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class Lowered:
    """The graph of npu operators for one SoC and bucket.

    Attributes:
        graph_module: placeholders are the batch, the caches, the weights; the output is the logits.
        soc: the target. phase: "prefill" or "decode". bucket: the static sizes.
        batch: the batch's inputs in order.
        caches: how each cache lies on the device, in order of the inputs.
        weights: what each weight input is and how its bytes come from the checkpoint's.
        sites: vocabulary op -> what each of its sites became, in order.
        results: of the fusions that only this target has.
    """

    graph_module: fx.GraphModule
    soc: str
    phase: str
    bucket: Bucket
    batch: tuple[BatchInput, ...]
    caches: tuple[DeviceCache, ...]
    weights: tuple[PreparedWeight, ...]
    sites: Mapping[str, tuple[str, ...]]
    results: tuple[PassResult, ...] = ()


def lower(
    graph_module: fx.GraphModule,
    *,
    soc: str,
    phase: str,
    bucket: Bucket,
    caches: Sequence[CacheShape],
    latent_width: int,
    dtype: torch.dtype = torch.bfloat16,
    parallel: ExpertParallel | None = None,
) -> Lowered:
    """Lower one phase's fused graph.

    Args:
        graph_module: after the passes; weights are marked (`ir.signature.mark_weights`).
        soc: "ascend-a3" or "ascend-950".
        phase: "prefill" or "decode"; in decode T = B.
        bucket: the static sizes.
        caches: the caches of the graph signature.
        latent_width: columns of a latent cache that are its latent part; the rest is rope.
        dtype: of activations and matrices; fp32 only to compare with eager.
        parallel: this device's place among those that share the experts; None for a device alone.

    Raises:
        UsageError: an unknown SoC, or decode sizes with T != B.
        DoesNotFitError: operators whose constraints the graph breaks, all of them in one message.
        CompileError: a node that cannot be lowered.
    """
    if soc not in SOCS:
        raise UsageError(f"unknown SoC {soc!r}", f"use one of {', '.join(SOCS)}")
    if phase == "decode" and bucket.tokens != bucket.sequences:
        raise UsageError(
            f"a decode bucket has one token a sequence, not {bucket.tokens} in {bucket.sequences}",
            "give decode buckets as a number of sequences",
        )
    define_operators()
    prologs = choose_prologs(graph_module, soc, bucket)
    parallel = parallel or ExpertParallel()
    decode = phase == "decode"
    plan = _plan_inputs(graph_module, soc, bucket, caches, latent_width, dtype, prologs, decode)
    plan = _shared_experts(graph_module, plan, parallel)
    context = Context(soc, dtype, bucket, parallel)
    traced = _trace(graph_module, plan, context, prologs)
    if context.violations:
        raise DoesNotFitError(soc, {phase: context.violations})
    weights = prepare_weights(traced, plan.weights)
    added = fuse_add_rms_norm(traced)  # after: a norm's weight is then an input, not a cast
    return Lowered(
        traced,
        soc,
        phase,
        bucket,
        plan.batch,
        plan.caches,
        weights,
        {name: tuple(found) for name, found in context.sites.items()},
        (prologs.result, added, mega_kda_result(graph_module, soc, bucket)),
    )


@dataclass(frozen=True)
class _Plan:
    """The inputs of the lowered graph."""

    batch: tuple[BatchInput, ...]
    caches: tuple[DeviceCache, ...]
    weights: tuple[PreparedWeight, ...]


def batch_inputs(bucket: Bucket, decode: bool) -> tuple[BatchInput, ...]:
    """The batch's inputs with the shapes of a bucket, in the graph signature's order."""
    sizes: tuple[Size, ...] = (bucket.tokens, bucket.sequences, bucket.columns, bucket.logits)
    starts: Size = bucket.sequences + 1
    if bucket.dynamic:
        sizes = ("sequences" if decode else "tokens", "sequences", "columns", "logits")
        starts = "sequences + 1"
    tokens, sequences, columns, logits = sizes
    shapes: dict[str, tuple[Size, ...]] = {
        "token_ids": (tokens,),
        "query_start": (starts,),
        "context_len": (sequences,),
        "slot_mapping": (tokens,),
        "block_table": (sequences, columns),
        "state_slot": (sequences,),
        "logits_index": (logits,),
    }
    return tuple(BatchInput(name, shapes[name]) for name in METADATA)


def device_caches(
    caches: Sequence[CacheShape], bucket: Bucket, latent_width: int, dtype: torch.dtype
) -> tuple[DeviceCache, ...]:
    """The device tensors of the signature's caches, in its order."""
    name = str(dtype).removeprefix("torch.")
    found: list[DeviceCache] = []
    for cache in caches:
        if cache.paged:
            pages = (bucket.blocks + 1, bucket.block_size, *cache.row[:-1])
            width = cache.row[-1]
            cuts = [(0, width)]
            if cache.kind == "latent":
                cuts = [(0, latent_width), (latent_width, width)]
            for part, cut in zip(("", "_rope"), cuts, strict=False):
                shape = (*pages, cut[1] - cut[0])
                found.append(DeviceCache(cache.name + part, cache.name, "paged", shape, name, cut))
            continue
        *lead, rows, columns = (bucket.slots + 1, *cache.row)
        kind = "float32" if cache.kind == "kda_state" else name
        found.append(DeviceCache(cache.name, cache.name, cache.kind, (*lead, columns, rows), kind))
    return tuple(found)


def _plan_inputs(
    gm: fx.GraphModule,
    soc: str,
    bucket: Bucket,
    caches: Sequence[CacheShape],
    latent_width: int,
    dtype: torch.dtype,
    prologs: Prologs,
    decode: bool,
) -> _Plan:
    decoded = {} if soc == ASCEND_950 else _decoded_experts(gm)
    names = _weight_names(gm)
    weights = []
    for node in gm.graph.nodes:
        source = weight_name(node)
        if node.op != "placeholder" or source is None:
            continue
        value = node.meta["val"]
        shape = tuple(map(int, value.shape))
        if node in decoded:
            shape, scale = (*shape[:-1], 2 * shape[-1]), decoded[node]
            steps = (("decode_mxfp4", (), ()),)
            weights.append(PreparedWeight(names[node], source, shape, dtype, steps, scale))
            continue
        kept = value.dtype if value.ndim < 2 or not value.is_floating_point() else dtype
        weights.append(PreparedWeight(names[node], source, shape, kept))
    for site in prologs.sites:
        shape = tuple(map(int, site.key_up.meta["val"].shape))
        source = str(weight_name(site.key_up))
        weights.append(PreparedWeight(_key_up_name(names, site), source, shape, dtype))
    return _Plan(
        batch_inputs(bucket, decode),
        device_caches(caches, bucket, latent_width, dtype),
        tuple(weights),
    )


def _shared_experts(gm: fx.GraphModule, plan: _Plan, parallel: ExpertParallel) -> _Plan:
    """The plan with this device's part of the experts' weights."""
    if parallel.devices == 1:
        return plan
    names = _weight_names(gm)
    shared = {names[node] for node in expert_weights(gm)}
    weights = tuple(own_part(w, parallel) if w.name in shared else w for w in plan.weights)
    return replace(plan, weights=weights)


def _key_up_name(names: Mapping[fx.Node, str], site: PrologSite) -> str:
    """The input of the part of a weight that a prolog reads; attention reads the whole."""
    return f"{names[site.key_up]}_key_up"


def _weight_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Weight placeholders -> the names of their device inputs: the parameters', as identifiers."""
    return {
        node: re.sub(r"\W", "_", str(weight_name(node)))
        for node in _placeholders(gm)
        if weight_name(node) is not None
    }


def _decoded_experts(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Packed MXFP4 weights -> their scales' names, for a SoC without FP4."""
    found = {}
    for node in gm.graph.nodes:
        op = find(node.target)
        if op is not None and op.name == "moe_experts_mxfp4":
            for packed, scale in _MXFP4_PAIRS:
                found[node.args[packed]] = str(weight_name(node.args[scale]))
    return found


def _trace(gm: fx.GraphModule, plan: _Plan, context: Context, prologs: Prologs) -> fx.GraphModule:
    """Run the fused graph on fake tensors and keep what it calls."""
    sizes = SymbolicSizes() if context.bucket.dynamic else None
    mode = sizes.mode if sizes else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = {}
        for each in plan.batch:
            shape = sizes.shape(each.shape) if sizes else each.shape
            inputs[each.name] = torch.empty(shape, dtype=torch.int32)  # type: ignore[arg-type]
        for cache in plan.caches:
            inputs[cache.name] = torch.empty(cache.shape, dtype=getattr(torch, cache.dtype))
        for weight in plan.weights:
            inputs[weight.name] = torch.empty(weight.shape, dtype=weight.dtype)
        names = list(inputs)

        def run(*values: Tensor) -> Any:
            given = _join_latents(dict(zip(names, values, strict=True)), plan.caches)
            named = _weight_names(gm)
            given |= {node.name: given[name] for node, name in named.items()}
            keys = {site: given[_key_up_name(named, site)] for site in prologs.sites}
            return _Runner(gm, context, keys).run_with(given)

        with enable_python_dispatcher() if sizes else contextlib.nullcontext():
            traced = make_fx(run, tracing_mode="real")(*inputs.values())
    if sizes:
        sizes.require_open("lowering")
        traced.meta[OPEN_SIZES] = sizes
    for node, name in zip(_placeholders(traced), names, strict=True):
        node.name = node.target = name
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _join_latents(values: dict[str, Any], caches: Sequence[DeviceCache]) -> dict[str, Any]:
    """Make one value of a latent cache's two device tensors."""
    for cache in caches:
        if cache.name != cache.cache:
            values[cache.cache] = PagedLatent(values[cache.cache], values[cache.name])
    return values


class _Runner(fx.Interpreter):
    """Runs the fused graph, calling a lowering for each vocabulary op."""

    def __init__(
        self, gm: fx.GraphModule, context: Context, prologs: Mapping[PrologSite, Tensor]
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.context = context
        self.given: dict[str, Any] = {}
        self.prologs = {site.members[0]: (site, key_up) for site, key_up in prologs.items()}
        self.inside = {node for site in prologs for node in site.members}
        self.emitted: dict[fx.Node, Any] = {}

    def run_with(self, given: dict[str, Any]) -> Any:
        """Run with input values by placeholder name."""
        self.given = given
        count = sum(node.op == "placeholder" for node in self.graph.nodes)
        return super().run(*([None] * count))

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An input, by name."""
        return self.given[str(target)]

    def run_node(self, n: fx.Node) -> Any:
        """One node; assertions about sizes are of no use once sizes are static."""
        self.context.node = n
        self.context.values = self.env  # `run` makes a new one
        if n in self.inside:
            return self._prolog(n)
        return None if is_assertion(n) else super().run_node(n)

    def _prolog(self, n: fx.Node) -> Any:
        """A member of a prolog: the first one emits the operator, others are what it returned."""
        if n in self.prologs:
            site, key_up = self.prologs[n]
            latent = self.env[site.cache]
            found = lower_mla_prolog(self.context, site, self.env.__getitem__, latent, key_up)
            self.emitted.update(found)
            self.env[site.cache] = found[site.cache]
        return self.emitted.get(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A vocabulary op by its lowering, anything else as it is."""
        op = find(target)
        if op is not None:
            return self._lower(op.name, args, kwargs)
        if any(isinstance(value, PagedLatent) for value in (*args, *kwargs.values())):
            raise CompileError(
                f"lowering: {self.context.node} reads a latent cache outside of a fused operator",
                "compile with every fusion pass, and see why this site was refused",
            )
        name = str(getattr(target, "_opname", getattr(target, "__name__", "")))
        if name in _MATMULS:
            args = tuple(self._matrix(value) for value in args)
        return super().call_function(target, args, kwargs)

    def _matrix(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.context.dtype)
        if isinstance(value, list | tuple):
            return type(value)(self._matrix(each) for each in value)
        return value

    def _lower(self, name: str, args: Any, kwargs: Any) -> Any:
        if name not in LOWERINGS:
            raise CompileError(
                f"lowering: {self.context.node} is a {name}, which has no form on Ascend",
                "compile for the CPU",
            )
        return LOWERINGS[name](self.context, *args, **kwargs)
