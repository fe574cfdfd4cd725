"""How torch's exporter writes the nodes it does not know: the vocabulary, and a sort that keeps ties in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18, values

from hybridge.compiler.targets.onnx.schemas import DOMAIN, VERSION, register_schemas
from hybridge.ops import FusedOp, vocabulary

TranslationTable = dict[Callable[..., Any], Callable[..., Any]]


def translation_table() -> TranslationTable:
    """`custom_translation_table` of `torch.onnx.export`: the vocabulary without effects, and sort."""
    register_schemas()
    ops = {op.functional: _translation(op) for op in vocabulary.values()}
    return {**ops, torch.ops.aten.sort.stable: _stable_sort}


def _translation(op: FusedOp) -> Callable[..., Any]:
    def translate(*inputs: Any, **attributes: Any) -> Any:
        # An attribute or a last input that is None is left out of the node.
        given = {name: value for name, value in attributes.items() if value is not None}
        return getattr(values.Opset(DOMAIN, VERSION), op.onnx_type)(*inputs, **given)

    return translate


def _stable_sort(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Any:
    """Sort by a TopK of everything: among equal values it takes the lowest index first (tested)."""
    size = opset18.Gather(opset18.Shape(x), opset18.Constant(value_ints=[dim]), axis=0)
    return opset18.TopK(x, size, axis=dim, largest=int(descending), sorted=1)
