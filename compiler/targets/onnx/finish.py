"""From the exporter's model to ours: names of the signature, weights by name only, bodies, no traces.

The exporter leaves source paths, symbol names and the weights' tensors in its model. What is left here
depends on the graph alone, so that the same input gives the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from hybridge.artifacts.dtypes import from_onnx
from hybridge.artifacts.errors import CompileError
from hybridge.artifacts.manifest import TensorSpec
from hybridge.artifacts.onnx_initializers import LOCATION
from hybridge.compiler.targets.onnx.functions import OPSET, Variant, local_function
from hybridge.compiler.targets.onnx.schemas import (
    BF16_ACTIVATIONS,
    DOMAIN,
    ROUNDING_OPS,
    VERSION,
)
from hybridge.ops import FusedOp, vocabulary

# Input, axis and the name of its size in DESIGN.md. Where T is B (decode), B comes first and stays.
_SIZES = (
    ("context_len", 0, "B"),
    ("token_ids", 0, "T"),
    ("block_table", 1, "M"),
    ("logits_index", 0, "L"),
    ("latent_cache_", 0, "N"),
    ("indexer_cache_", 0, "N"),
    ("kda_state_", 0, "slots"),
    ("conv_state_", 0, "slots"),
)


@dataclass(frozen=True)
class FinishedModel:
    """An ONNX file's bytes, what its inputs and outputs are, and how many nodes it has."""

    data: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: int


def finish_model(
    model: ir.Model,
    outputs: Sequence[str],
    weights: Collection[str],
    *,
    bf16_activations: bool = False,
) -> FinishedModel:
    """Finish the exporter's model, in place.

    Args:
        model: as exported.
        outputs: the outputs' names, in order.
        weights: names of the initializers that are weights; others are constants and stay inline.
        bf16_activations: let matrix products round their activations to bf16.

    Raises:
        CompileError: nodes of one op differ in what they leave out, so that no one body serves them.
    """
    graph = model.graph
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    _drop_unused(graph)
    _externalise(graph, weights)
    symbols = _symbols(graph)
    _rename_sizes(graph, symbols)
    specs = [_spec(value) for value in (*graph.inputs, *graph.outputs)]
    _forget_traces(model)
    _attach_functions(model)
    if bf16_activations:
        _allow_rounding(model)
    proto = ir.serde.serialize_model(model)
    count = len(graph.inputs)
    data = proto.SerializeToString(deterministic=True)
    return FinishedModel(data, tuple(specs[:count]), tuple(specs[count:]), len(graph))


def _drop_unused(graph: ir.Graph) -> None:
    returned = set(graph.outputs)
    for node in reversed(graph):
        if not any(value.uses() or value in returned for value in node.outputs):
            graph.remove(node, safe=True)


def _externalise(graph: ir.Graph, weights: Collection[str]) -> None:
    """Leave of each weight its name, type and shape; initializers in the order of their names."""
    kept = {name: graph.initializers.pop(name) for name in sorted(graph.initializers)}
    for name, value in kept.items():
        if not value.uses():
            continue
        if name in weights:
            assert value.dtype is not None
            assert value.shape is not None
            length = math.prod(value.shape.numpy()) * value.dtype.itemsize
            value.const_value = ir.ExternalTensor(
                LOCATION, 0, int(length), value.dtype, shape=value.shape, name=name
            )
        graph.initializers[name] = value


def _symbols(graph: ir.Graph) -> dict[str, str]:
    """The traced symbols (`s19`) and the names that DESIGN.md gives them."""
    found: dict[str, str] = {}
    for prefix, axis, symbol in _SIZES:
        for value in graph.inputs:
            if not str(value.name).startswith(prefix) or value.shape is None:
                continue
            size = value.shape[axis]
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                found.setdefault(size.value, symbol)
    return found


def _rename_sizes(graph: ir.Graph, symbols: Mapping[str, str]) -> None:
    for value in (*graph.inputs, *(item for node in graph for item in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    size if isinstance(size, int) else _renamed(str(size.value), symbols)
                    for size in value.shape
                ]
            )


def _spec(value: ir.Value) -> TensorSpec:
    assert value.shape is not None
    assert value.dtype is not None
    element = from_onnx(value.dtype.value)
    assert element is not None
    sizes = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return TensorSpec(str(value.name), element.name, sizes)


def _renamed(size: str, symbols: Mapping[str, str]) -> str:
    """`s19 + 1` -> `B+1`."""
    return re.sub(r"\w+", lambda word: symbols.get(word[0], word[0]), size).replace(" ", "")


def _allow_rounding(model: ir.Model) -> None:
    """Mark the products of the graph; bodies declare the mark and ignore it."""
    rounding = {vocabulary[name].onnx_type for name in ROUNDING_OPS}
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type in rounding:
            node.attributes[BF16_ACTIVATIONS] = ir.AttrInt64(BF16_ACTIVATIONS, 1)
    for function in model.functions.values():
        if function.domain == DOMAIN and function.name in rounding:
            function.attributes[BF16_ACTIVATIONS] = ir.AttrInt64(BF16_ACTIVATIONS, 0)


def _forget_traces(model: ir.Model) -> None:
    """Drop what names source files, modules and the exporter."""
    model.producer_name, model.producer_version = "hybridge", None
    graph = model.graph
    model.metadata_props.clear()
    graph.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()


def _attach_functions(model: ir.Model) -> None:
    by_type = {op.onnx_type: op for op in vocabulary.values()}
    variants: dict[str, tuple[Variant, ir.Node]] = {}
    fp32: dict[str, frozenset[str]] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        variant = _variant(by_type[node.op_type], node)
        wide = _fp32_inputs(by_type[node.op_type], node)
        fp32[node.op_type] = fp32.get(node.op_type, wide) & wide
        known, first = variants.setdefault(node.op_type, (variant, node))
        if known != variant:
            raise CompileError(
                f"emit: nodes {first.name} and {node.name} are both {node.op_type} but differ in optional "
                f"inputs, optional attributes or text attributes: {known} and {variant}",
                "one model-local function has one body: make the model's layers agree, or split the op",
            )
    for name in sorted(variants):
        variant = replace(variants[name][0], fp32=fp32[name])
        function = local_function(by_type[name], variant)
        model.functions[function.identifier()] = function
    model.graph.opset_imports[DOMAIN] = VERSION
    model.graph.opset_imports[""] = OPSET


def _fp32_inputs(op: FusedOp, node: ir.Node) -> frozenset[str]:
    named = zip(op.tensor_arguments, node.inputs, strict=False)
    return frozenset(
        name for name, value in named if value is None or value.dtype is ir.DataType.FLOAT
    )


def _variant(op: FusedOp, node: ir.Node) -> Variant:
    values = [*node.inputs, *[None] * (len(op.tensor_arguments) - len(node.inputs))]
    named = zip(op.tensor_arguments, values, strict=True)
    absent = {name for name, value in named if value is None}
    absent |= set(op.attributes) - set(node.attributes)
    texts = {
        name: attribute.as_string()
        for name, attribute in node.attributes.items()
        if attribute.type is ir.AttributeType.STRING
    }
    return Variant(frozenset(absent), tuple(sorted(texts.items())))
