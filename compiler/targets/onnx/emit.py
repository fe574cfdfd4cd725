"""Emit phases as ONNX: values for effects, torch's exporter, our names, no weight bytes.

A graph needs onnxruntime and the bytes of its weights, which the runner maps by name; every op of the
vocabulary has a model-local function, so the native library is optional.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from hybridge.artifacts.errors import CompileError
from hybridge.artifacts.manifest import TensorSpec
from hybridge.compiler.targets.onnx.finish import finish_model
from hybridge.compiler.targets.onnx.fold_weights import drop_unread_weights, fold_weights
from hybridge.compiler.targets.onnx.functionalise import functionalise
from hybridge.compiler.targets.onnx.functions import OPSET
from hybridge.compiler.targets.onnx.lower_einsum import lower_einsum
from hybridge.compiler.targets.onnx.lower_linear import lower_linear
from hybridge.compiler.targets.onnx.lower_mla_absorb import lower_mla_absorb
from hybridge.compiler.targets.onnx.pack_weights import ValueCheck, choose_packed, set_packed
from hybridge.compiler.targets.onnx.storage import (
    DTypes,
    narrow_caches,
    set_cache_dtypes,
    set_weight_dtypes,
    weight_dtypes,
    weight_nodes,
)
from hybridge.compiler.targets.onnx.translations import translation_table
from hybridge.compiler.trace import TracedPhase
from hybridge.ir.derived import Recipe
from hybridge.ir.signature import mark_weights, weight_name

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightSpec:
    """A weight as the graph reads it.

    Args:
        name: its initializer's name: a parameter's, or a derived weight's.
        dtype: fp32 where the checkpoint has less and a reader cannot widen it: then it is stored anew.
        shape: its shape.
        recipe: how it is made from other weights; None is a parameter of the model.
        packed: in packed rows (`hybridge.ops.packed_rows`) of bf16; dtype and shape are those of the bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    recipe: Recipe | None
    packed: bool = False


@dataclass(frozen=True)
class EmittedGraph:
    """One phase, ready to load.

    Args:
        model: the bytes of the ONNX file; weights are external data at the location "weights".
        inputs: the graph signature's inputs, in order.
        outputs: `logits`, then `<cache>_out` for every cache, in order.
        weights: what the graph reads, sorted by name.
        recipes: of every derived weight, also of those that only others are made from.
        writes: how often each cache is written in a step.
        nodes: how many nodes the graph has, functions not counted.
        unpacked: bf16 weights that were to be packed, and why they stay as they are; of all phases.
    """

    model: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: tuple[WeightSpec, ...]
    recipes: Mapping[str, Recipe]
    writes: Mapping[str, int]
    nodes: int
    unpacked: Mapping[str, str]


def emit_onnx(
    traced: Sequence[TracedPhase],
    stored: DTypes,
    *,
    bf16_activations: bool = False,
    pack: ValueCheck | None = None,
) -> dict[str, EmittedGraph]:
    """Lower the phases of one model. Their graphs stay as they are.

    Args:
        traced: the phases; `traced.graph_module` is what the passes left.
        stored: the type of each parameter in the checkpoint; fp32 where it is not named.
        bf16_activations: let matrix products with narrow weights round their activations to bf16, and keep
            paged caches in bf16.
        pack: store bf16 weights in packed rows where their values allow it, see `choose_packed`.

    Returns:
        phase -> graph. A weight has one type in all of them.

    Raises:
        CompileError: see `functionalise`; a node that the exporter cannot translate.
    """
    lowered = {phase.phase: _lower(phase) for phase in traced}
    dtypes = weight_dtypes(lowered.values(), stored)
    paged = {cache.name for phase in traced for cache in phase.caches if cache.paged}
    narrow = narrow_caches(lowered.values(), paged) if bf16_activations else frozenset()
    for gm in lowered.values():
        set_cache_dtypes(gm, narrow)
    reasons = choose_packed(list(lowered.values()), dtypes, pack) if pack is not None else {}
    return {
        phase.phase: _emit(phase, lowered[phase.phase], dtypes, reasons, bf16_activations)
        for phase in traced
    }


def _lower(traced: TracedPhase) -> GraphModule:
    """A copy of the phase's graph in the form that the exporter gets."""
    source = traced.graph_module
    gm = GraphModule(source, copy.deepcopy(source.graph))
    gm.meta.update(source.meta)
    gm.meta["derived_weights"] = dict(source.meta.get("derived_weights", {}))
    mark_weights(gm, traced.weights)
    lower_linear(gm)
    fold_weights(gm)
    lower_mla_absorb(gm)
    # What is left, and the permuted weights that it makes.
    lower_einsum(gm)
    fold_weights(gm)
    drop_unread_weights(gm)
    return gm


def _emit(
    traced: TracedPhase,
    gm: GraphModule,
    dtypes: DTypes,
    reasons: Mapping[str, str | None],
    bf16_activations: bool,
) -> EmittedGraph:
    set_weight_dtypes(gm, dtypes)
    packed = frozenset(name for name, reason in reasons.items() if reason is None)
    set_packed(gm, packed)
    caches = tuple(cache.name for cache in traced.caches)
    writes = functionalise(gm, caches)
    recipes: Mapping[str, Recipe] = gm.meta.get("derived_weights", {})
    weights = tuple(
        WeightSpec(
            name,
            node.meta["val"].dtype,
            tuple(node.meta["val"].shape),
            recipes.get(name),
            packed=name in packed,
        )
        for name, node in sorted((str(weight_name(node)), node) for node in weight_nodes(gm.graph))
    )
    model = _export(traced, gm)
    names = ("logits", *(f"{cache}_out" for cache in caches))
    done = finish_model(
        model, names, {weight.name for weight in weights}, bf16_activations=bf16_activations
    )
    unpacked = {name: reason for name, reason in sorted(reasons.items()) if reason is not None}
    return EmittedGraph(
        done.data, done.inputs, done.outputs, weights, recipes, writes, done.nodes, unpacked
    )


def _program(kind: type[ExportedProgram], traced: TracedPhase, gm: GraphModule) -> ExportedProgram:
    """`gm` as an exported program without effects: every output is the user's."""
    lifted = {spec.arg.name: spec for spec in traced.program.graph_signature.input_specs}
    inputs: list[InputSpec] = []
    state: dict[str, torch.Tensor | torch.nn.Parameter] = {}
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        name, argument = weight_name(node), TensorArgument(name=node.name)
        if name is not None:
            state[name] = torch.nn.Parameter(node.meta["val"], requires_grad=False)
            inputs.append(InputSpec(InputKind.PARAMETER, argument, name))
        elif node.name in traced.inputs:
            inputs.append(InputSpec(InputKind.USER_INPUT, argument, None))
        else:
            inputs.append(lifted[node.name])
    returned: Any = gm.graph.output_node().args[0]
    results = [str(node.name) for node in returned]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name), None) for name in results]
    gm.graph.set_codegen(CodeGen())
    gm.recompile()
    return kind(
        gm,
        gm.graph,
        ExportGraphSignature(inputs, outputs),
        state,
        traced.program.range_constraints,
        _flat_call(list(traced.inputs), results),
        None,
        traced.program.constants,
        verifiers=traced.program.verifiers,
    )


def _flat_call(inputs: list[str], outputs: list[str]) -> list[ModuleCallEntry]:
    """The calling convention: all inputs in order, a tuple back."""
    given = pytree.tree_structure((tuple(inputs), {}))
    returned = pytree.tree_structure(tuple(outputs))
    return [ModuleCallEntry("", ModuleCallSignature([], [], given, returned, inputs))]


class _Decomposed(ExportedProgram):
    """A program of which every node has a translation.

    The exporter retraces a program three times to decompose it: three quarters of its time on a large graph,
    and of no use to ours, which is functional and made of ops that ONNX has.
    """

    def run_decompositions(self, *_table: Any, **_options: Any) -> ExportedProgram:
        """Already done."""
        return self


def _export(traced: TracedPhase, gm: GraphModule) -> ir.Model:
    """Translate as it is; a graph with an op that only a decomposition makes translatable goes the long way."""
    try:
        return _translate(_program(_Decomposed, traced, gm))
    except Exception:
        _logger.info("%s: an op has no translation; decomposing the graph", traced.phase)
    try:
        return _translate(_program(ExportedProgram, traced, gm))
    except Exception as error:
        raise CompileError(
            f"emit: torch.onnx cannot translate the {traced.phase} graph: {_innermost(error)}",
            "give the node a translation in targets/onnx/aten.py, or rewrite it in a pass",
        ) from error


def _translate(program: ExportedProgram) -> ir.Model:
    """torch's exporter without its optimiser, which would look for the weights' bytes."""
    with _quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            custom_translation_table=translation_table(),
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    model: ir.Model = exported.model
    return model


def _innermost(error: BaseException) -> str:
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(str(cause).split("\n")[0])
        cause = cause.__cause__
    return " <- ".join(reversed(messages[1:])) or messages[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


__all__ = ["EmittedGraph", "WeightSpec", "emit_onnx"]
