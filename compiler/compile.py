"""From a checkpoint to an artifact: trace, passes, lowering, weights, golden values."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from hybridge.artifacts.cache import CompileCache
from hybridge.artifacts.errors import ArtifactError, UsageError
from hybridge.artifacts.manifest import GoldenSpec, Manifest, read_manifest
from hybridge.artifacts.store import ArtifactWriter
from hybridge.compiler.build import ACTIVATIONS, Activations, Build, CompileOptions
from hybridge.compiler.cache_key import cache_fields
from hybridge.compiler.describe import describe, report
from hybridge.compiler.pipeline import run_pipeline, select_passes
from hybridge.compiler.reference import (
    check_values,
    eager_model,
    fits_in_memory,
    golden_case,
)
from hybridge.compiler.rounding import narrow_weights, with_rounding
from hybridge.compiler.source import Source, open_source
from hybridge.compiler.targets.ascend import artifact as ascend_artifact
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.options import AscendOptions
from hybridge.compiler.targets.onnx.emit import EmittedGraph, WeightSpec, emit_onnx
from hybridge.compiler.trace import trace
from hybridge.compiler.weights import POLICIES, WeightsPolicy, WeightWriter, packing_check
from hybridge.models.batch import PHASES, Phase
from hybridge.models.model import HybridModel
from hybridge.models.tensor_names import weight_sources

Progress = Callable[[str], None]

# A graph computes in fp32, as the eager model does; what differs is the order of sums. 1e-3 on logits
# of order 1 to 10 is what fp32 reordering reaches in deep models, and far below a wrong mask or scale.
GOLDEN_TOLERANCE = 1e-3


def compile_model(
    source: str | Path,
    output: str | Path,
    *,
    target: str = "cpu",
    phases: Sequence[str] | None = None,
    passes: Sequence[str] | None = None,
    weights: str | None = None,
    block_size: int = 64,
    activations: str = "float32",
    dumps: bool = False,
    check_passes: bool = False,
    golden: bool = True,
    ascend: AscendOptions | None = None,
    overwrite: bool = False,
    cache: str | Path | None = None,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Compile a checkpoint into an artifact.

    Args:
        source: a checkpoint folder; with `weights="none"` also a preset's name or a config.json.
        output: the artifact's folder; nothing is visible there before all is done.
        target, phases, passes, weights, block_size, activations, dumps, check_passes, golden: see
            `CompileOptions`; weights None is "reference" for the CPU and "copy" for Ascend, whose graphs read most
            weights in another form than the checkpoint's.
        ascend: more options of an Ascend target; SoC and block size are those above.
        overwrite: replace an artifact that is there.
        cache: a folder that keeps a copy of every artifact by all that decides it, and serves it the next time; where
            it cannot be written, a warning says so.
        progress: told what is being done.

    Returns:
        The artifact's manifest.

    Raises:
        UsageError: an argument does not fit.
        CheckpointError: the checkpoint is not right.
        CompileError: a phase cannot be traced, a pass missed sites that the config promises, or a
            node cannot be lowered.
        ArtifactError: the output exists or cannot be written.
    """
    options = _checked(
        CompileOptions(
            target=target,
            phases=tuple(cast(Sequence[Phase], phases or PHASES)),
            passes=None if passes is None else tuple(passes),
            weights=cast(WeightsPolicy, weights or ("copy" if target in SOCS else "reference")),
            block_size=block_size,
            activations=cast(Activations, activations),
            dumps=dumps,
            check_passes=check_passes,
            golden=golden,
        )
    )
    on_ascend = ascend_artifact.choose_options(target, block_size, ascend)
    model = open_source(source, with_weights=options.weights != "none")
    if cache is not None:
        kept = _usable_cache(Path(cache), Path(output))
        return _reuse(kept, model, Path(output), options, on_ascend, overwrite, progress)
    return _compile(model, Path(output), options, on_ascend, overwrite, progress)


def _reuse(
    kept: CompileCache,
    model: Source,
    output: Path,
    options: CompileOptions,
    on_ascend: AscendOptions | None,
    overwrite: bool,
    progress: Progress,
) -> Manifest:
    """The artifact from the cache; one that is not there is compiled and kept."""
    golden = _wants_golden(model, options) and fits_in_memory(model.config)
    progress("cache: hash the checkpoint and the compiler")
    fields = cache_fields(model, options, on_ascend, golden=golden)
    if kept.copy_to(fields, output, overwrite=overwrite):
        progress(f"cache: copied from {kept.folder}, nothing to compile")
        return read_manifest(output)[0]
    progress(f"cache: not there: {kept.explain_miss(fields)}")
    manifest = _compile(model, output, options, on_ascend, overwrite, progress)
    # Memory may have run short since the key was made: the artifact would lie under a key of what it has not.
    if bool(manifest.golden) == golden:
        _keep(kept, fields, output)
    return manifest


def _usable_cache(folder: Path, output: Path) -> CompileCache:
    """The cache in a folder; refuses one that the artifact would replace, and hold itself."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"cache {folder} is no folder", "give another folder")
    if folder.resolve().is_relative_to(output.resolve()):
        raise UsageError(
            f"cache {folder} lies in the artifact {output}", "give a folder outside of it"
        )
    return CompileCache(folder)


def _keep(kept: CompileCache, fields: Mapping[str, Any], output: Path) -> None:
    """Put an artifact into the cache. It is whole without that, so that a failure only warns."""
    try:
        kept.put(fields, output)
    except ArtifactError as error:
        warnings.warn(f"{output} is whole, but not in the cache: {error.message}", stacklevel=2)


def _compile(
    model: Source,
    output: Path,
    options: CompileOptions,
    on_ascend: AscendOptions | None,
    overwrite: bool,
    progress: Progress,
) -> Manifest:
    build = Build()
    with ArtifactWriter(output, overwrite=overwrite) as writer:
        with _without_garbage_collection():
            _trace_and_rewrite(model, options, writer, build, progress)
        if on_ascend is not None:
            return _finish_on_ascend(model, options, on_ascend, writer, build, progress)
        return _finish_on_cpu(model, options, writer, build, progress)


def _finish_on_cpu(
    model: Source,
    options: CompileOptions,
    writer: ArtifactWriter,
    build: Build,
    progress: Progress,
) -> Manifest:
    """From rewritten graphs to an artifact for the CPU."""
    with _without_garbage_collection():
        graphs = _emit_graphs(model, options, writer, build, progress)
    with build.timed("weights"):
        progress(f"weights: {options.weights}")
        _write_weights(model, options, writer, graphs)
    with build.timed("golden"):
        golden = _write_golden(model, options, writer, progress)
    if model.tokenizer is not None:
        writer.add_file("tokenizer/tokenizer.json", model.tokenizer)
    progress("write the manifest")
    return writer.finish(describe(model, options, build, graphs, golden), report(build))


def _finish_on_ascend(
    model: Source,
    options: CompileOptions,
    on_ascend: AscendOptions,
    writer: ArtifactWriter,
    build: Build,
    progress: Progress,
) -> Manifest:
    """What is different for Ascend: graphs, weights as its graphs read them, wider golden tolerances."""
    emitted = ascend_artifact.emit_into(writer, build, model.config, on_ascend, progress)
    with build.timed("weights"):
        progress(f"weights: {options.weights}")
        ascend_artifact.weights_into(
            writer, emitted, model.config, model.checkpoint, options.weights
        )
    with build.timed("golden"):
        eager = _eager(model, options, progress)
        golden = None if eager is None else ascend_artifact.golden_into(writer, eager, on_ascend)
    if model.tokenizer is not None:
        writer.add_file("tokenizer/tokenizer.json", model.tokenizer)
    common = describe(model, options, build, {}, ())
    return writer.finish(
        ascend_artifact.complete(common, emitted, on_ascend, golden), report(build)
    )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Graphs are one web of references that lives to the end: a collector that walks it again and again finds
    nothing, and takes a fifth of the time of a trace.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _checked(options: CompileOptions) -> CompileOptions:
    """The options with their phases in order; refuses what does not fit."""
    for value, known, what in (
        (options.target, ("cpu", *SOCS), "target"),
        (options.weights, POLICIES, "weights policy"),
        (options.activations, ACTIVATIONS, "activation type"),
        *((phase, PHASES, "phase") for phase in options.phases),
    ):
        if value not in known:
            raise UsageError(f"unknown {what} {value!r}", f"use one of {', '.join(known)}")
    if options.weights == "packed" and options.target in SOCS:
        raise UsageError(f"packed weights do not fit {options.target}", "use --weights copy")
    if options.activations != "float32" and options.target in SOCS:
        raise UsageError(
            f"--activations {options.activations} is a choice of the cpu target; {options.target} has its own",
            "leave it out",
        )
    if options.block_size < 1:
        raise UsageError(f"block size {options.block_size} is not positive", "use 16, 64 or 128")
    select_passes(options.passes)
    return replace(options, phases=tuple(each for each in PHASES if each in options.phases))


def _trace_and_rewrite(
    model: Source,
    options: CompileOptions,
    writer: ArtifactWriter,
    build: Build,
    progress: Progress,
) -> None:
    """Trace every phase and run the passes on it."""
    proofs: dict[str, Any] = {}
    for phase in options.phases:
        progress(f"{phase}: trace")
        with build.timed(f"{phase}/trace"):
            build.traced[phase] = trace(model.config, phase, block_size=options.block_size)
        with build.timed(f"{phase}/passes"):
            _run_passes(phase, model, options, writer, build, proofs, progress)


def _emit_graphs(
    model: Source,
    options: CompileOptions,
    writer: ArtifactWriter,
    build: Build,
    progress: Progress,
) -> Mapping[str, EmittedGraph]:
    """Lower every phase for the CPU."""
    progress("emit the graphs")
    pack = None
    if options.weights == "packed" and model.checkpoint is not None:
        pack = packing_check(model.config, model.checkpoint)
    with build.timed("emit"):
        graphs = emit_onnx(
            list(build.traced.values()),
            _stored_dtypes(model),
            bf16_activations=options.activations == "bfloat16",
            pack=pack,
        )
    for name, graph in graphs.items():
        writer.add_bytes(f"graphs/{name}.onnx", graph.model)
    return graphs


def _run_passes(
    phase: Phase,
    model: Source,
    options: CompileOptions,
    writer: ArtifactWriter,
    build: Build,
    proofs: dict[str, Any],
    progress: Progress,
) -> None:
    traced = build.traced[phase]
    values = None
    if options.check_passes and model.checkpoint is not None:
        values = check_values(
            eager_model(model.checkpoint, model.config), phase, options.block_size
        )
    build.reports[phase] = run_pipeline(
        traced.graph_module,
        phase,
        model.config,
        passes=options.passes,
        keep_dumps=options.dumps,
        check_inputs=values,
        weights=traced.weights,
        proofs=proofs,
        on_step=lambda result: progress(f"{phase}: {result.name}: {len(result.matches)} matches"),
    )
    for name, text in build.reports[phase].dumps.items():
        writer.add_bytes(f"dumps/{phase}/{name}.txt", text.encode())


def _stored_dtypes(model: Source) -> dict[str, torch.dtype]:
    """The type that each parameter is stored in: the checkpoint's, or the config's without one."""
    sources = weight_sources(model.config)
    if model.checkpoint is not None:
        return {source.name: model.checkpoint.weight_dtype(source) for source in sources}
    return {source.name: getattr(torch, source.dtype) for source in sources}


def _write_weights(
    model: Source,
    options: CompileOptions,
    writer: ArtifactWriter,
    graphs: Mapping[str, EmittedGraph],
) -> None:
    wanted: dict[str, WeightSpec] = {}
    recipes: dict[str, Mapping[str, Any]] = {}
    for graph in graphs.values():
        wanted |= {weight.name: weight for weight in graph.weights}
        recipes |= graph.recipes
    weights = WeightWriter(writer, model.config, model.checkpoint, options.weights, recipes)
    weights.write(wanted[name] for name in sorted(wanted))


def _wants_golden(model: Source, options: CompileOptions) -> bool:
    weighted = model.checkpoint is not None and options.weights != "none"
    return options.golden and weighted and options.phases == PHASES


def _eager(model: Source, options: CompileOptions, progress: Progress) -> HybridModel | None:
    """The eager model for golden values; None where there are no weights or they do not fit."""
    if model.checkpoint is None or not _wants_golden(model, options):
        return None
    if not fits_in_memory(model.config):
        progress("golden: left out, the eager model does not fit in memory here")
        return None
    progress("golden: run the eager model")
    return eager_model(model.checkpoint, model.config)


def _write_golden(
    model: Source, options: CompileOptions, writer: ArtifactWriter, progress: Progress
) -> tuple[GoldenSpec, ...]:
    """Golden values of the eager model."""
    eager = _eager(model, options, progress)
    if eager is None:
        return ()
    case, tolerance = golden_case(eager), GOLDEN_TOLERANCE
    if options.activations == "bfloat16" and model.checkpoint is not None:
        progress("golden: measure what rounding does")
        narrow = narrow_weights(model.checkpoint, model.config)
        case, tolerance = with_rounding(eager, case, narrow, GOLDEN_TOLERANCE)
    return (writer.add_golden("eager", case, atol=tolerance),)
