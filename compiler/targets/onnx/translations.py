"""What torch's exporter is told: how to write the vocabulary, and some aten ops better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxscript import values

from hybridge.compiler.targets.onnx.aten import aten_table
from hybridge.compiler.targets.onnx.schemas import DOMAIN, VERSION, register_schemas
from hybridge.ops import FusedOp, vocabulary

TranslationTable = dict[Callable[..., Any], Callable[..., Any]]


def translation_table() -> TranslationTable:
    """`custom_translation_table` of `torch.onnx.export`: the vocabulary without effects, and aten."""
    register_schemas()
    ops = {op.functional: _translation(op) for op in vocabulary.values()}
    return {**ops, **aten_table()}


def _translation(op: FusedOp) -> Callable[..., Any]:
    def translate(*inputs: Any, **attributes: Any) -> Any:
        # An attribute or a last input that is None is left out of the node.
        given = {name: value for name, value in attributes.items() if value is not None}
        return getattr(values.Opset(DOMAIN, VERSION), op.onnx_type)(*inputs, **given)

    return translate
