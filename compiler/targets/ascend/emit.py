"""From fused phases to everything that an Ascend deployment needs, as files and data.

A phase becomes one graph a bucket, of static or open sizes: lowered to npu operators, laid out, put on streams and
into super kernels, proved, converted to GE. Nothing is written here; the caller puts the files into
its artifact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridge.artifacts.errors import CompileError
from hybridge.artifacts.manifest import PhaseSpec, StateSpec
from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend import describe
from hybridge.compiler.targets.ascend.constraints import SOCS, Violation
from hybridge.compiler.targets.ascend.emitted import EmittedGraph
from hybridge.compiler.targets.ascend.expert_parallel import ExpertParallel
from hybridge.compiler.targets.ascend.fit import DoesNotFitError
from hybridge.compiler.targets.ascend.lowering import Lowered, lower
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.compiler.targets.ascend.options import AscendOptions
from hybridge.compiler.targets.ascend.stored_weights import StoredWeight, stored_weights
from hybridge.compiler.trace import TracedPhase
from hybridge.ir.derived import Recipe
from hybridge.ir.pass_base import PassResult
from hybridge.ir.schedule import Schedule
from hybridge.ir.schedule_ops import schedule_of
from hybridge.models.config import ModelConfig
from hybridge.passes.assign_nz_layout import (
    AssignNzLayout,
    Layout,
    WeightUse,
    broken_needs,
    weight_uses,
)
from hybridge.passes.assign_streams import AssignStreams
from hybridge.passes.check_schedule import Proof, prove
from hybridge.passes.merge_super_kernels import MergeSuperKernels, SuperKernelPolicy

MXFP4_GROUP = 32


@dataclass(frozen=True)
class Emitted:
    """What goes into the artifact.

    Attributes:
        files: path in the artifact -> bytes.
        target_data: for the manifest.
        phases: the manifest's signature of each phase: the batch, then the caches as they lie on the
            device; the weights follow, in the order of `graphs/<graph>_weights.json`.
        states: the manifest's caches and states, at their sizes on the device.
        weights: whose bytes the graphs need. recipes: of the derived ones among their sources.
        results: phase -> results of the target's own passes on its first graph, for the manifest's
            pass list.
        seconds: "decode/lower" -> time.
    """

    files: Mapping[str, bytes]
    target_data: Mapping[str, Any]
    phases: Mapping[str, PhaseSpec]
    states: tuple[StateSpec, ...]
    weights: tuple[StoredWeight, ...]
    recipes: Mapping[str, Recipe]
    results: Mapping[str, tuple[PassResult, ...]]
    seconds: Mapping[str, float] = field(default_factory=dict)


def emit_ascend(
    phases: Sequence[TracedPhase],
    config: ModelConfig,
    options: AscendOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> Emitted:
    """Lower, lay out, schedule, prove and convert every phase, once a bucket.

    Args:
        phases: traced, after the fusion passes, weights marked.
        config: the model.
        options: see `AscendOptions`.
        progress: told what is being done.

    Raises:
        UsageError: an option does not fit.
        DoesNotFitError: the model does not fit the operators; every reason of every graph.
        CompileError: the schedule is not safe, or torchair
            cannot convert.
    """
    graphs = _emit_graphs(phases, config, options, progress)
    every = [graph for found in graphs.values() for graph in found]
    weights, names = stored_weights(
        {each.name: list(zip(each.lowered.weights, each.layouts, strict=True)) for each in every}
    )
    files: dict[str, bytes] = {}
    recipes: dict[str, Recipe] = {}
    for each in every:
        files |= describe.graph_files(each, names[each.name])
    for traced in phases:
        recipes |= traced.graph_module.meta.get("derived_weights", {})
    return Emitted(
        files=files,
        target_data={"ascend": describe.target_data(every, weights, options)},
        phases={phase: describe.phase_spec(found) for phase, found in graphs.items()},
        states=describe.state_specs(phases[0], every[0]),
        weights=weights,
        recipes=recipes,
        results={phase: found[0].results for phase, found in graphs.items()},
        seconds={
            f"{each.name}/{step}": took for each in every for step, took in each.seconds.items()
        },
    )


def _emit_graphs(
    phases: Sequence[TracedPhase],
    config: ModelConfig,
    options: AscendOptions,
    progress: Callable[[str], None],
) -> dict[str, list[EmittedGraph]]:
    """All graphs of each phase; what does not fit in any of them is told together."""
    graphs: dict[str, list[EmittedGraph]] = {traced.phase: [] for traced in phases}
    broken: dict[str, Sequence[Violation]] = {}
    for traced in phases:
        for name, bucket in options.buckets(traced.phase).items():
            try:
                graph = _emit_graph(traced, name, bucket, config, options, progress)
            except DoesNotFitError as error:
                broken[name] = error.violations[traced.phase]
            else:
                graphs[traced.phase].append(graph)
    if broken:
        raise DoesNotFitError(options.soc, broken)
    return graphs


def _emit_graph(
    traced: TracedPhase,
    name: str,
    bucket: Bucket,
    config: ModelConfig,
    options: AscendOptions,
    progress: Callable[[str], None],
) -> EmittedGraph:
    phase, soc = traced.phase, SOCS.get(options.soc)
    seconds: dict[str, float] = {}

    def step(what: str, run: Callable[[], Any]) -> Any:
        progress(f"{name}: {what}")
        start = time.perf_counter()
        result = run()
        seconds[what] = time.perf_counter() - start
        return result

    lowered: Lowered = step(
        "lower",
        lambda: lower(
            traced.graph_module,
            soc=options.soc,
            phase=phase,
            bucket=bucket,
            caches=traced.caches,
            latent_width=config.kv_lora_rank,
            parallel=ExpertParallel(options.expert_parallel, options.expert_rank),
        ),
    )
    assert soc is not None  # lower has refused any other
    gm = lowered.graph_module
    policy = options.nz_policy()
    uses = weight_uses(gm.graph, [w.name for w in lowered.weights], _groups(lowered))
    laid, layouts = step("assign_nz_layout", lambda: AssignNzLayout().run(uses, policy))
    _needs_are_met(layouts, uses)
    results, choices, scopes = [*lowered.results, laid], (), ()
    if options.streams and not bucket.dynamic:  # its estimates compare sizes
        placed, choices = step("assign_streams", lambda: AssignStreams().run(gm, soc.machine))
        results.append(placed)
    if options.super_kernels and phase == "decode" and not bucket.dynamic:  # static kernels only
        merged, scopes = step(
            "merge_super_kernels",
            lambda: MergeSuperKernels().run(gm, soc.machine, SuperKernelPolicy()),
        )
        results.append(merged)
    schedule = schedule_of(gm.graph, soc.aic, soc.aiv)
    proof = step("check_schedule", lambda: _proved(schedule, phase))
    graph = None
    if options.convert:
        graph = step("convert", lambda: _convert(lowered, name, options))
    return EmittedGraph(
        *(name, lowered, layouts), choices, scopes, schedule, proof, graph, tuple(results), seconds
    )


def _needs_are_met(layouts: Sequence[Layout], uses: Sequence[WeightUse]) -> None:
    problems = broken_needs(layouts, uses)
    if problems:
        raise CompileError(
            "assign_nz_layout: " + "\n  ".join(problems),
            "give the operator a weight of its own, in a dtype that has FRACTAL_NZ",
        )


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


def _convert(lowered: Lowered, name: str, options: AscendOptions) -> ge.GeGraph:
    return ge.convert(
        lowered.graph_module,
        {cache.name: cache.cache for cache in lowered.caches},
        soc=options.soc,
        cann_version=options.cann_version,
        name=name,
    )
