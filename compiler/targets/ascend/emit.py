"""From fused phases to everything that an Ascend deployment needs, as files and data.

A phase becomes one graph of static sizes: lowered to npu operators, laid out, put on streams and
into super kernels, proved, converted to GE. Nothing is written here; the caller puts the files into
its artifact.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.artifacts.manifest import PhaseSpec, StateSpec, TensorSpec
from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.expert_parallel import ExpertParallel
from hybridge.compiler.targets.ascend.graph_source import graph_json, python_source
from hybridge.compiler.targets.ascend.lowering import Lowered, lower
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.compiler.targets.ascend.op_table import coverage
from hybridge.compiler.targets.ascend.own_operators import OWN_OPERATORS
from hybridge.compiler.targets.ascend.prepared_weights import describe_steps
from hybridge.compiler.trace import TracedPhase
from hybridge.ir.pass_base import PassResult
from hybridge.ir.schedule import Schedule
from hybridge.ir.schedule_ops import schedule_of
from hybridge.models.config import ModelConfig
from hybridge.passes.assign_nz_layout import (
    FRACTAL_NZ,
    AssignNzLayout,
    Layout,
    NzPolicy,
    WeightUse,
    broken_needs,
    weight_uses,
)
from hybridge.passes.assign_streams import AssignStreams, Choice, explain, kinds
from hybridge.passes.check_schedule import Proof, prove
from hybridge.passes.merge_super_kernels import MergeSuperKernels, Scope, SuperKernelPolicy

NZ_MODES = ("auto", "off", "quantised", "all")
MXFP4_GROUP = 32
NOT_CHECKED = (
    "compilation of the GE graph to a device binary",
    "execution, numerics and speed on a device",
    "that the installed CANN has the operators and optional inputs listed as unverified",
)


@dataclass(frozen=True)
class AscendOptions:
    """What a caller may choose for this target.

    Attributes:
        soc: "ascend-a3" or "ascend-950".
        cann_version: the CANN version that torchair is told.
        nz: "auto" (as the SoC's recipes do), "off", "quantised" or "all".
        streams: whether to use side streams. super_kernels: whether to mark scopes.
        decode_sequences: B (and T) of the decode graph.
        prefill_tokens: T of the prefill graph. prefill_sequences: its B.
        block_size: rows a cache block. blocks: N. columns: M. slots: recurrent states.
        expert_parallel: devices that share the experts. expert_rank: this one's place among them.
        convert: whether to make the GE graph; without, the rest is made and the wheel not needed.
    """

    soc: str
    cann_version: str = "9.0.0"
    nz: str = "auto"
    streams: bool = True
    super_kernels: bool = True
    decode_sequences: int = 16
    prefill_tokens: int = 1024
    prefill_sequences: int = 4
    block_size: int = 128
    blocks: int = 1024
    columns: int = 64
    slots: int = 16
    expert_parallel: int = 1
    expert_rank: int = 0
    convert: bool = True

    def bucket(self, phase: str) -> Bucket:
        """The static sizes of a phase's graph."""
        decode = phase == "decode"
        sequences = self.decode_sequences if decode else self.prefill_sequences
        return Bucket(
            tokens=sequences if decode else self.prefill_tokens,
            sequences=sequences,
            blocks=self.blocks,
            block_size=self.block_size,
            columns=self.columns,
            slots=self.slots,
            logits=sequences,
        )


@dataclass(frozen=True)
class EmittedPhase:
    """One phase's graph with all that was decided about it."""

    lowered: Lowered
    layouts: tuple[Layout, ...]
    choices: tuple[Choice, ...]
    scopes: tuple[Scope, ...]
    schedule: Schedule
    proof: Proof
    graph: ge.GeGraph | None
    results: tuple[PassResult, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Emitted:
    """What goes into the artifact.

    Attributes:
        files: path in the artifact -> bytes.
        target_data: for the manifest.
        phases: the manifest's signature of each phase: the batch, then the caches as they lie on the
            device; the weights follow, in the order of `graphs/<phase>_weights.json`.
        states: the manifest's caches and states, at their sizes on the device.
        results: phase -> results of the target's own passes, for the manifest's pass list.
        seconds: "decode/lower" -> time.
    """

    files: Mapping[str, bytes]
    target_data: Mapping[str, Any]
    phases: Mapping[str, PhaseSpec]
    states: tuple[StateSpec, ...]
    results: Mapping[str, tuple[PassResult, ...]]
    seconds: Mapping[str, float] = field(default_factory=dict)


def emit_ascend(
    phases: Sequence[TracedPhase],
    config: ModelConfig,
    options: AscendOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> Emitted:
    """Lower, lay out, schedule, prove and convert every phase.

    Args:
        phases: traced, after the fusion passes, weights marked.
        config: the model.
        options: see `AscendOptions`.
        progress: told what is being done.

    Raises:
        UsageError: an option does not fit.
        CompileError: the model does not fit the operators, the schedule is not safe, or torchair
            cannot convert.
    """
    if options.nz not in NZ_MODES:
        raise UsageError(f"unknown --nz {options.nz!r}", f"use one of {', '.join(NZ_MODES)}")
    files: dict[str, bytes] = {}
    emitted: dict[str, EmittedPhase] = {}
    for traced in phases:
        emitted[traced.phase] = _emit_phase(traced, config, options, progress)
        files |= _files(emitted[traced.phase])
    return Emitted(
        files=files,
        target_data={"ascend": _target_data(emitted, options)},
        phases={phase: _phase_spec(each) for phase, each in emitted.items()},
        states=_states(phases[0], emitted[phases[0].phase].lowered),
        results={phase: each.results for phase, each in emitted.items()},
        seconds={
            f"{phase}/{step}": took
            for phase, each in emitted.items()
            for step, took in each.seconds.items()
        },
    )


def _emit_phase(
    traced: TracedPhase,
    config: ModelConfig,
    options: AscendOptions,
    progress: Callable[[str], None],
) -> EmittedPhase:
    phase, soc = traced.phase, SOCS.get(options.soc)
    seconds: dict[str, float] = {}

    def step(name: str, run: Callable[[], Any]) -> Any:
        progress(f"{phase}: {name}")
        start = time.perf_counter()
        result = run()
        seconds[name] = time.perf_counter() - start
        return result

    lowered: Lowered = step(
        "lower",
        lambda: lower(
            traced.graph_module,
            soc=options.soc,
            phase=phase,
            bucket=options.bucket(phase),
            caches=traced.caches,
            latent_width=config.kv_lora_rank,
            parallel=ExpertParallel(options.expert_parallel, options.expert_rank),
        ),
    )
    assert soc is not None  # lower has refused any other
    gm = lowered.graph_module
    policy = nz_policy(options)
    uses = weight_uses(gm.graph, [w.name for w in lowered.weights], _groups(lowered))
    laid, layouts = step("assign_nz_layout", lambda: AssignNzLayout().run(uses, policy))
    _needs_are_met(layouts, uses)
    results, choices, scopes = [*lowered.results, laid], (), ()
    if options.streams:
        placed, choices = step(
            "assign_streams", lambda: AssignStreams().run(gm, soc.machine, phase)
        )
        results.append(placed)
    if options.super_kernels and phase == "decode":
        merged, scopes = step(
            "merge_super_kernels",
            lambda: MergeSuperKernels().run(gm, soc.machine, SuperKernelPolicy()),
        )
        results.append(merged)
    schedule = schedule_of(gm.graph, soc.aic, soc.aiv)
    proof = step("check_schedule", lambda: _proved(schedule, phase))
    graph = None
    if options.convert:
        graph = step("convert", lambda: _convert(lowered, options))
    return EmittedPhase(
        lowered, layouts, choices, scopes, schedule, proof, graph, tuple(results), seconds
    )


def _needs_are_met(layouts: Sequence[Layout], uses: Sequence[WeightUse]) -> None:
    problems = broken_needs(layouts, uses)
    if problems:
        raise CompileError(
            "assign_nz_layout: " + "\n  ".join(problems),
            "give the operator a weight of its own, in a dtype that has FRACTAL_NZ",
        )


def nz_policy(options: AscendOptions) -> NzPolicy:
    """What `assign_nz_layout` is to aim at."""
    if options.nz == "auto":
        return NzPolicy("all", only_where_needed=SOCS[options.soc].nz_only_where_needed)
    return NzPolicy(options.nz)


def _groups(lowered: Lowered) -> dict[str, int]:
    """Packed MXFP4 weights that stay packed -> the elements that share a scale."""
    found = {}
    for weight in lowered.weights:
        if weight.source.endswith("_packed") and not weight.scale_source:
            found[weight.name] = MXFP4_GROUP
    return found


def _proved(schedule: Schedule, phase: str) -> Proof:
    proof = prove(schedule)
    problem = proof.shortest()
    if problem is not None:
        raise CompileError(
            f"check_schedule: the {phase} schedule is not safe, {len(proof.problems)} problems; "
            f"the shortest:\n{problem}",
            "compile with --no-streams, and report this with the dump",
        )
    return proof


def _convert(lowered: Lowered, options: AscendOptions) -> ge.GeGraph:
    return ge.convert(
        lowered.graph_module,
        {cache.name: cache.cache for cache in lowered.caches},
        soc=options.soc,
        cann_version=options.cann_version,
        name=lowered.phase,
    )


# ------------------------------------------------------------------------------- files and data


def _files(emitted: EmittedPhase) -> dict[str, bytes]:
    lowered = emitted.lowered
    phase, soc = lowered.phase, lowered.soc
    title = f"The {phase} graph for {soc}: torch_npu operators, for npugraph_ex."
    source = python_source(lowered.graph_module, emitted.schedule, title)
    found = {
        f"graphs/{phase}_npugraph_ex.py": source.encode(),
        f"graphs/{phase}_npu.json": graph_json(lowered.graph_module).encode(),
        f"graphs/{phase}_weights.json": _json(_weights_plan(emitted)),
        f"graphs/{phase}_streams.json": _json(explain(emitted.choices)),
    }
    if emitted.graph is not None:
        found[f"graphs/{phase}.pb"] = emitted.graph.proto
        found[f"graphs/{phase}.txt"] = emitted.graph.text.encode()
    return found


def _phase_spec(emitted: EmittedPhase) -> PhaseSpec:
    lowered = emitted.lowered
    graph = (
        f"{lowered.phase}.pb" if emitted.graph is not None else f"{lowered.phase}_npugraph_ex.py"
    )
    batch = [TensorSpec(each.name, "int32", each.shape) for each in lowered.batch]
    caches = [TensorSpec(each.name, each.dtype, each.shape) for each in lowered.caches]
    output = lowered.graph_module.graph.output_node().args[0]
    logits = output[0] if isinstance(output, list | tuple) else output
    value = logits.meta["val"]  # type: ignore[union-attr]
    result = TensorSpec("logits", layout_dtype(value.dtype), tuple(value.shape))
    return PhaseSpec(f"graphs/{graph}", (*batch, *caches), (result,), (asdict(lowered.bucket),))


def _states(traced: TracedPhase, lowered: Lowered) -> tuple[StateSpec, ...]:
    owners = {cache.name: cache for cache in traced.caches}
    return tuple(
        StateSpec(
            each.name, owners[each.cache].layer, owners[each.cache].kind, each.dtype, each.shape
        )
        for each in lowered.caches
    )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _weights_plan(emitted: EmittedPhase) -> list[dict[str, Any]]:
    """Every weight: where it comes from, what is done to it, how it lies on the device."""
    layouts = {layout.name: layout for layout in emitted.layouts}
    plan = []
    for weight in emitted.lowered.weights:
        layout = layouts[weight.name]
        plan.append(
            {
                "input": weight.name,
                "source": weight.source,
                **({"scale": weight.scale_source} if weight.scale_source else {}),
                "steps": describe_steps(weight),
                "dtype": layout_dtype(weight.dtype),
                "shape": list(weight.shape),
                "layout": layout.layout,
                "stored": list(layout.stored),
                "bytes": layout.bytes,
                "rule": layout.rule,
                "reason": layout.reason,
                "rule_source": layout.source,
            }
        )
    return plan


def layout_dtype(dtype: Any) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _target_data(emitted: Mapping[str, EmittedPhase], options: AscendOptions) -> dict[str, Any]:
    phases = {phase: _phase_data(each) for phase, each in emitted.items()}
    graphs = [each.graph for each in emitted.values() if each.graph is not None]
    unverified = dict.fromkeys(text for graph in graphs for text in graph.unverified)
    used = {op for each in phases.values() for op in each["operators"]}

    def total(name: str) -> int:
        return sum(each[name] for each in phases.values())

    return {
        "soc": options.soc,
        "cann_version": options.cann_version,
        "torch_npu": graphs[0].torchair if graphs else None,
        "options": asdict(options),
        "ge_nodes": total("ge_nodes"),
        "cache_copies": total("cache_copies"),
        "tensor_moves": total("tensor_moves"),
        "streams": max(each["streams"] for each in phases.values()),
        "events": total("events"),
        "super_kernel_scopes": total("super_kernel_scopes"),
        "nz_weights": total("nz_weights"),
        "nd_weights": total("nd_weights"),
        "fusion_sites": total("fusion_sites"),
        "fused_sites": total("fused_sites"),
        "sites_without_operator": total("sites_without_operator"),
        "nz_share": round(_nz_share(emitted.values()), 4),
        "schedule_proved": all(each["schedule_proved"] for each in phases.values()),
        "phases": phases,
        "state_layout": _state_layout(next(iter(emitted.values()))),
        "own_operators": {
            name: {"ge_type": op.ge_type, "source": op.source}
            for name, op in OWN_OPERATORS.items()
            if f"hybridge_ascend::{name}" in used
        },
        "unverified": list(unverified),
        "not_checked_here": list(NOT_CHECKED),
    }


def _phase_data(emitted: EmittedPhase) -> dict[str, Any]:
    lowered, graph, proof = emitted.lowered, emitted.graph, emitted.proof
    nz = sum(layout.layout == FRACTAL_NZ for layout in emitted.layouts)
    operators: dict[str, int] = {}
    for node in lowered.graph_module.graph.nodes:
        name = str(getattr(getattr(node.target, "_schema", None), "name", ""))
        if name.startswith(("npu::", "hybridge_ascend::")):
            operators[name] = operators.get(name, 0) + 1
    return {
        "bucket": asdict(lowered.bucket),
        "npu_nodes": len(lowered.graph_module.graph.nodes),
        "ge_nodes": sum(graph.nodes.values()) if graph else 0,
        "ge_operators": graph.nodes if graph else {},
        "cache_copies": len(graph.cache_copies) if graph else 0,
        "cache_copy_causes": [asdict(copy) for copy in graph.cache_copies] if graph else [],
        "tensor_moves": graph.moves if graph else 0,
        "operators": dict(sorted(operators.items())),
        "sites": {name: _counted(found) for name, found in lowered.sites.items()},
        **_coverage(lowered),
        "streams": proof.streams,
        "stream_nodes": kinds(lowered.graph_module),
        "events": proof.events,
        "super_kernel_scopes": proof.scopes,
        "nz_weights": nz,
        "nd_weights": len(emitted.layouts) - nz,
        "schedule_proved": proof.proved,
        "ordered_pairs": proof.pairs,
    }


def _coverage(lowered: Lowered) -> dict[str, int]:
    found = coverage(lowered.sites, lowered.soc)
    return {
        "fusion_sites": found.sites,
        "fused_sites": found.fused,
        "sites_without_operator": found.without_operator,
    }


def _nz_share(phases: Iterable[EmittedPhase]) -> float:
    """The part of all weights' bytes that lies in FRACTAL_NZ; a weight of two phases counts once."""
    plan = {layout.name: layout for each in phases for layout in each.layouts}
    nz = sum(layout.bytes for layout in plan.values() if layout.layout == FRACTAL_NZ)
    return nz / max(1, sum(layout.bytes for layout in plan.values()))


def _counted(found: Sequence[str]) -> dict[str, int]:
    return {text: found.count(text) for text in dict.fromkeys(found)}


def _state_layout(emitted: EmittedPhase) -> dict[str, Any]:
    """How caches lie on the device, for whoever allocates them."""
    return {
        "null_row": "block 0 of a paged cache and row 0 of a state take what must not be kept; "
        "block b is b + 1, slot s is row s + 1; zero the states once",
        "caches": [asdict(cache) for cache in emitted.lowered.caches],
    }
