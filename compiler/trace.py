"""Trace the eager model, one graph a phase, with no weight in memory.

The graph is torch.export's, not functionalised: a write to a cache is a node without users, and the order of
the nodes is the meaning. Passes work on this form; a target that needs values instead makes them (see
`targets/onnx/functionalise.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from hybridge.artifacts.errors import CompileError
from hybridge.models.batch import Phase
from hybridge.models.caches import CacheShape, cache_shapes
from hybridge.models.config import ModelConfig
from hybridge.models.model import HybridModel

BATCH_INPUTS = (
    "token_ids",
    "query_start",
    "context_len",
    "slot_mapping",
    "block_table",
    "state_slot",
    "logits_index",
)


@dataclass(frozen=True)
class TracedPhase:
    """One phase of a model as a graph.

    Args:
        phase: "prefill" or "decode".
        program: the exported program; `program.graph_module` is the graph that passes rewrite.
        inputs: names of the graph inputs (placeholders) in order: the batch, then the caches.
        caches: the caches, in the order of the inputs.
        weights: placeholder name -> parameter name (`model.layers.3.self_attn.q_a_proj.weight`).
    """

    phase: Phase
    program: ExportedProgram
    inputs: tuple[str, ...]
    caches: tuple[CacheShape, ...]
    weights: dict[str, str]

    @property
    def graph_module(self) -> fx.GraphModule:
        module: fx.GraphModule = self.program.graph_module
        return module


class _OnePhase(nn.Module):
    """Binds the phase, so that export sees tensors only."""

    def __init__(self, model: HybridModel, phase: Phase) -> None:
        super().__init__()
        self.wrapped = model
        self.phase = phase

    def forward(self, batch: dict[str, Tensor], caches: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.wrapped(self.phase, **batch, caches=caches)
        return logits


def trace(config: ModelConfig, phase: Phase, *, block_size: int) -> TracedPhase:
    """Export one phase with symbolic sizes.

    Args:
        config: the model.
        phase: "prefill": T tokens in B sequences; "decode": T = B.
        block_size: rows in a cache block; static, so that positions divide by a constant.

    Raises:
        CompileError: torch.export refused; the message carries its reason.
    """
    # The tracer warns of every op without autograd; the graph is for inference only.
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    shapes = dynamic_shapes(config, phase)
    try:
        # Fake tensors rather than the meta device: they have no bytes either, and the graph says "cpu".
        with FakeTensorMode(allow_non_fake_inputs=True):
            module = _OnePhase(HybridModel(config), phase)
            inputs = example_inputs(config, phase, block_size)
        program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise CompileError(
            f"trace: torch.export cannot trace the {phase} phase: {error}",
            "report the model part that the last line names; the eager model must stay traceable",
        ) from error
    return _named(program, phase, cache_shapes(config))


def example_inputs(
    config: ModelConfig, phase: Phase, block_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of the graph signature; their values are not read.

    Sizes that vary differ pairwise, so that the tracer unifies none of them.
    """
    sequences, blocks, columns, slots, wanted = 3, 17, 5, 7, 2
    tokens = sequences if phase == "decode" else 11
    sizes: dict[str, int] = {
        "token_ids": tokens,
        "query_start": sequences + 1,
        "context_len": sequences,
        "slot_mapping": tokens,
        "state_slot": sequences,
        "logits_index": wanted,
    }
    batch = {
        name: torch.empty(
            (sequences, columns) if name == "block_table" else sizes[name],
            dtype=torch.int32,
        )
        for name in BATCH_INPUTS
    }
    caches = {
        cache.name: torch.empty(cache.shape(blocks, block_size, slots))
        for cache in cache_shapes(config)
    }
    return batch, caches


def dynamic_shapes(config: ModelConfig, phase: Phase) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which dimensions vary, named as in DESIGN.md: T, B, M (max_blocks), N (blocks), slots, L."""
    sequences = Dim("B", min=1)
    tokens = sequences if phase == "decode" else Dim("T", min=1)
    blocks, columns, slots, wanted = (Dim(name, min=1) for name in ("N", "M", "slots", "L"))
    batch = {
        "token_ids": {0: tokens},
        "query_start": {0: sequences + 1},
        "context_len": {0: sequences},
        "slot_mapping": {0: tokens},
        "block_table": {0: sequences, 1: columns},
        "state_slot": {0: sequences},
        "logits_index": {0: wanted},
    }
    caches = {cache.name: {0: blocks if cache.paged else slots} for cache in cache_shapes(config)}
    return batch, caches


def _named(program: ExportedProgram, phase: Phase, caches: tuple[CacheShape, ...]) -> TracedPhase:
    """Give the placeholders the names of the graph signature."""
    names = (*BATCH_INPUTS, *(cache.name for cache in caches))
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    weights: dict[str, str] = {}
    wanted = iter(names)
    renamed: dict[str, str] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER:
            assert spec.target is not None
            weights[spec.arg.name] = spec.target.removeprefix("wrapped.")
        elif spec.kind is InputKind.USER_INPUT:
            name = next(wanted)
            node = nodes[spec.arg.name]
            renamed[node.name] = name
            node.name = node.target = name
            spec.arg = type(spec.arg)(name=name)
    program.graph_module.recompile()
    return TracedPhase(phase, program, names, caches, weights)
