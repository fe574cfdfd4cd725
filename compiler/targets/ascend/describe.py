"""What an emitted graph is in an artifact: its files, its signature, and the figures about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hybridge.artifacts.manifest import PhaseSpec, StateSpec, TensorSpec
from hybridge.compiler.targets.ascend.emitted import EmittedGraph
from hybridge.compiler.targets.ascend.graph_source import graph_json, python_source
from hybridge.compiler.targets.ascend.lowering import Lowered
from hybridge.compiler.targets.ascend.op_table import coverage
from hybridge.compiler.targets.ascend.options import AscendOptions
from hybridge.compiler.targets.ascend.own_operators import OWN_OPERATORS
from hybridge.compiler.targets.ascend.prepared_weights import describe_steps
from hybridge.compiler.targets.ascend.stored_weights import StoredWeight
from hybridge.compiler.targets.ascend.symbolic_sizes import OPEN_SIZES
from hybridge.compiler.trace import TracedPhase
from hybridge.passes.assign_nz_layout import FRACTAL_NZ
from hybridge.passes.assign_streams import explain, kinds

NOT_CHECKED = (
    "compilation of the GE graph to a device binary",
    "execution, numerics and speed on a device",
    "that the installed CANN has the operators and optional inputs listed as unverified",
)


def graph_files(emitted: EmittedGraph, names: Mapping[str, str]) -> dict[str, bytes]:
    """Path in the artifact -> bytes.

    Args:
        emitted: one graph.
        names: its weight inputs -> the stored weights.
    """
    name, lowered = emitted.name, emitted.lowered
    title = f"The {name} graph for {lowered.soc}: torch_npu operators, for npugraph_ex."
    source = python_source(lowered.graph_module, emitted.schedule, title)
    found = {
        f"graphs/{name}_npugraph_ex.py": source.encode(),
        f"graphs/{name}_npu.json": graph_json(lowered.graph_module).encode(),
        f"graphs/{name}_weights.json": _json(_weights_plan(emitted, names)),
        f"graphs/{name}_streams.json": _json(explain(emitted.choices)),
    }
    if emitted.graph is not None:
        found[f"graphs/{name}.pb"] = emitted.graph.proto
        found[f"graphs/{name}.txt"] = emitted.graph.text.encode()
    return found


def phase_spec(graphs: Sequence[EmittedGraph]) -> PhaseSpec:
    """The signature of a phase: of its first graph, with the buckets of all."""
    first = graphs[0]
    lowered = first.lowered
    graph = f"{first.name}.pb" if first.graph is not None else f"{first.name}_npu.json"
    batch = [TensorSpec(each.name, "int32", each.shape) for each in lowered.batch]
    caches = [TensorSpec(each.name, each.dtype, each.shape) for each in lowered.caches]
    output = lowered.graph_module.graph.output_node().args[0]
    logits = output[0] if isinstance(output, list | tuple) else output
    value = logits.meta["val"]  # type: ignore[union-attr]
    sizes = lowered.graph_module.meta.get(OPEN_SIZES)
    shape = tuple(sizes.texts(value.shape) if sizes else value.shape)
    result = TensorSpec("logits", dtype_name(value.dtype), shape)
    buckets = tuple(_sizes(each.lowered) for each in graphs if not each.lowered.bucket.dynamic)
    return PhaseSpec(f"graphs/{graph}", (*batch, *caches), (result,), buckets)


def _sizes(lowered: Lowered) -> dict[str, int]:
    return {name: size for name, size in asdict(lowered.bucket).items() if name != "dynamic"}


def state_specs(traced: TracedPhase, emitted: EmittedGraph) -> tuple[StateSpec, ...]:
    """The caches and states at their sizes on the device; all graphs share them."""
    owners = {cache.name: cache for cache in traced.caches}
    return tuple(
        StateSpec(
            each.name, owners[each.cache].layer, owners[each.cache].kind, each.dtype, each.shape
        )
        for each in emitted.lowered.caches
    )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _weights_plan(emitted: EmittedGraph, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every weight: where it comes from, what is done to it, how it lies on the device."""
    plan = []
    for weight, layout in zip(emitted.lowered.weights, emitted.layouts, strict=True):
        plan.append(
            {
                "input": weight.name,
                "weight": names[weight.name],
                "source": weight.source,
                **({"scale": weight.scale_source} if weight.scale_source else {}),
                "steps": describe_steps(weight),
                "dtype": dtype_name(weight.dtype),
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


def dtype_name(dtype: Any) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def target_data(
    emitted: Sequence[EmittedGraph], weights: Sequence[StoredWeight], options: AscendOptions
) -> dict[str, Any]:
    """The manifest's `target_data.ascend`, which `inspect --json` shows as `ascend`."""
    graphs = {each.name: _graph_data(each) for each in emitted}
    converted = [each.graph for each in emitted if each.graph is not None]
    unverified = dict.fromkeys(text for graph in converted for text in graph.unverified)
    used = {op for each in graphs.values() for op in each["operators"]}

    def total(name: str) -> int:
        return sum(each[name] for each in graphs.values())

    return {
        "soc": options.soc,
        "cann_version": options.cann_version,
        "torch_npu": converted[0].torchair if converted else None,
        "options": asdict(options),
        "ge_nodes": total("ge_nodes"),
        "cache_copies": total("cache_copies"),
        "tensor_moves": total("tensor_moves"),
        "streams": max(each["streams"] for each in graphs.values()),
        "events": total("events"),
        "super_kernel_scopes": total("super_kernel_scopes"),
        **{name: total(name) for name in ("fusion_sites", "fused_sites", "sites_without_operator")},
        **_weight_figures(weights),
        "schedule_proved": all(each["schedule_proved"] for each in graphs.values()),
        "graphs": graphs,
        "state_layout": _state_layout(emitted[0]),
        "own_operators": {
            name: {"ge_type": op.ge_type, "source": op.source}
            for name, op in OWN_OPERATORS.items()
            if f"hybridge_ascend::{name}" in used
        },
        "unverified": list(unverified),
        "not_checked_here": list(NOT_CHECKED),
    }


def _weight_figures(weights: Sequence[StoredWeight]) -> dict[str, int | float]:
    """How many weights lie in which layout, and their bytes, padding included; each counts once."""
    layouts = [each.layout for each in weights]
    nz = [layout for layout in layouts if layout.layout == FRACTAL_NZ]
    nz_bytes, every = (sum(layout.bytes for layout in found) for found in (nz, layouts))
    return {
        "nz_weights": len(nz),
        "nd_weights": len(layouts) - len(nz),
        "nz_bytes": nz_bytes,
        "nd_bytes": every - nz_bytes,
        "nz_share": round(nz_bytes / max(1, every), 4),
    }


def _graph_data(emitted: EmittedGraph) -> dict[str, Any]:
    lowered, graph, proof = emitted.lowered, emitted.graph, emitted.proof
    nz = sum(layout.layout == FRACTAL_NZ for layout in emitted.layouts)
    operators: dict[str, int] = {}
    for node in lowered.graph_module.graph.nodes:
        name = str(getattr(getattr(node.target, "_schema", None), "name", ""))
        if name.startswith(("npu::", "hybridge_ascend::")):
            operators[name] = operators.get(name, 0) + 1
    return {
        "phase": lowered.phase,
        "bucket": _sizes(lowered),
        "dynamic": lowered.bucket.dynamic,
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


def _counted(found: Sequence[str]) -> dict[str, int]:
    return {text: found.count(text) for text in dict.fromkeys(found)}


def _state_layout(emitted: EmittedGraph) -> dict[str, Any]:
    """How caches lie on the device, for whoever allocates them."""
    return {
        "null_row": "block 0 of a paged cache and row 0 of a state take what must not be kept; "
        "block b is b + 1, slot s is row s + 1; zero the states once",
        "caches": [asdict(cache) for cache in emitted.lowered.caches],
    }
