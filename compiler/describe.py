"""The manifest of an artifact: what was compiled, how, and what each pass did."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict

from hybridge import __version__
from hybridge.artifacts import manifest as record
from hybridge.artifacts.canonical import digest_json
from hybridge.compiler.build import Build, CompileOptions
from hybridge.compiler.source import Source
from hybridge.compiler.targets.onnx.emit import EmittedGraph
from hybridge.ir.pass_base import PassResult
from hybridge.models.caches import CacheShape, cache_shapes

# A longer context costs cache memory from the start; the user raises it when loading.
DEFAULT_CONTEXT = 4096
TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime")


def describe(
    model: Source,
    options: CompileOptions,
    build: Build,
    graphs: Mapping[str, EmittedGraph],
    golden: tuple[record.GoldenSpec, ...],
) -> record.Manifest:
    """The manifest, without the list of files."""
    config = model.config
    caches = cache_shapes(config)
    # A cache has one type in all phases; a target without ONNX graphs says itself how its states lie.
    dtypes = {spec.name: spec.dtype for graph in graphs.values() for spec in graph.inputs}
    return record.Manifest(
        hybridge_version=__version__,
        model=record.ModelInfo(config.family, digest_json(config.raw), config.vocab_size),
        model_config=config.raw,
        target=options.target,
        phases={
            phase: record.PhaseSpec(f"graphs/{phase}.onnx", graph.inputs, graph.outputs)
            for phase, graph in graphs.items()
        },
        states=tuple(
            record.StateSpec(
                cache.name, cache.layer, cache.kind, dtypes[cache.name], _symbols(cache)
            )
            for cache in caches
            if cache.name in dtypes
        ),
        defaults=record.Defaults(
            block_size=options.block_size,
            max_context=min(DEFAULT_CONTEXT, config.max_position_embeddings),
        ),
        weights_policy=options.weights,
        passes={
            phase: tuple(_pass_record(result) for result in report.results)
            for phase, report in build.reports.items()
        },
        tools={name: importlib.metadata.version(name) for name in TOOLS},
        special_tokens=record.SpecialTokens(
            config.bos_token_id, config.eos_token_ids, config.pad_token_id
        ),
        golden=golden,
        tokenizer="tokenizer/tokenizer.json" if model.tokenizer else None,
        provenance=_provenance(options),
        target_data={"cpu": _cpu_data(options, graphs)},
    )


def _cpu_data(
    options: CompileOptions, graphs: Mapping[str, EmittedGraph]
) -> dict[str, Mapping[str, object]]:
    data: dict[str, Mapping[str, object]] = {
        "nodes": {phase: graph.nodes for phase, graph in graphs.items()}
    }
    if options.weights == "packed":
        data["unpacked"] = {
            n: why for graph in graphs.values() for n, why in graph.unpacked.items()
        }
    return data


def _symbols(cache: CacheShape) -> tuple[int | str, ...]:
    return (*(("blocks", "block_size") if cache.paged else ("slots",)), *cache.row)


def _pass_record(result: PassResult) -> record.PassRecord:
    refusals = tuple(
        record.Refusal(each.node, each.rule, each.reason, each.remedy) for each in result.refusals
    )
    extra: dict[str, object] = {
        "bytes_removed": result.bytes_removed,
        "bytes_moved_before": result.moved_before,
        "bytes_moved_after": result.moved_after,
    }
    if result.difference is not None:
        extra["difference"] = result.difference
    return record.PassRecord(
        result.name,
        len(result.matches),
        result.expected,
        refusals,
        result.nodes_before,
        result.nodes_after,
        extra,
    )


def report(build: Build) -> record.Report:
    """How long each step took; no part of the artifact's identity."""
    seconds: dict[str, dict[str, float]] = {
        str(phase): {result.name: result.seconds for result in report.results}
        for phase, report in build.reports.items()
    }
    return record.Report(pass_seconds=seconds, seconds=build.seconds)


def _provenance(options: CompileOptions) -> dict[str, object]:
    return {"options": asdict(options)}
