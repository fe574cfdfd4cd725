"""Bodies of the vocabulary's ops in standard ONNX ops: what runs without the native library.

`local_function` makes the model-local function of an op. Where the native library is registered its
kernel takes precedence over the function; elsewhere the runtime inlines the body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from hybridge.compiler.targets.onnx.functions.attention import (
    lightning_indexer,
    mla_attention,
    sparse_flash_attention,
)
from hybridge.compiler.targets.onnx.functions.attn_res import (
    attn_res_add_update_norm,
    attn_res_prepare,
    attn_res_update,
    attn_res_update_norm,
)
from hybridge.compiler.targets.onnx.functions.builder import (
    OPSET,
    Builder,
    Expression,
    attribute,
)
from hybridge.compiler.targets.onnx.functions.caches import paged_write, state_write
from hybridge.compiler.targets.onnx.functions.elementwise import linear, rms_norm, situ
from hybridge.compiler.targets.onnx.functions.kda import kda_decode, kda_prefill, kda_recurrence
from hybridge.compiler.targets.onnx.functions.mla_absorb import mla_absorb_query, mla_expand_value
from hybridge.compiler.targets.onnx.functions.moe import moe_experts, moe_experts_mxfp4, moe_route
from hybridge.compiler.targets.onnx.functions.packed import (
    kda_decode_packed,
    linear_packed,
    moe_experts_packed,
)
from hybridge.compiler.targets.onnx.schemas import DOMAIN, VERSION, attribute_type
from hybridge.ops import FusedOp

BODIES: dict[str, Callable[..., tuple[Expression, ...]]] = {
    body.__name__: body
    for body in (
        paged_write,
        state_write,
        lightning_indexer,
        sparse_flash_attention,
        mla_attention,
        mla_absorb_query,
        mla_expand_value,
        kda_recurrence,
        kda_prefill,
        kda_decode,
        attn_res_prepare,
        attn_res_update,
        attn_res_update_norm,
        attn_res_add_update_norm,
        moe_route,
        moe_experts,
        moe_experts_mxfp4,
        rms_norm,
        situ,
        linear,
        linear_packed,
        kda_decode_packed,
        moe_experts_packed,
    )
}


@dataclass(frozen=True)
class Variant:
    """What a body must know of the nodes it stands for, because ONNX cannot ask inside a function.

    Args:
        absent: optional inputs and attributes that the nodes leave out.
        strings: (name, value) of string attributes.
        fp32: inputs that are fp32 in all the nodes, so that the body need not cast them.
    """

    absent: frozenset[str] = frozenset()
    strings: tuple[tuple[str, str], ...] = ()
    fp32: frozenset[str] = frozenset()


def local_function(op: FusedOp, variant: Variant) -> ir.Function:
    """The function of domain `hybridge` that defines `op` in standard ops.

    Args:
        op: an op of the vocabulary.
        variant: what the nodes that call it leave out; those of one model must agree.
    """
    builder = Builder()
    inputs = {
        name: Expression(ir.Value(name=name), is_fp32=name in variant.fp32)
        for name in op.tensor_arguments
    }
    with builder.opened():
        given = {name: None if name in variant.absent else value for name, value in inputs.items()}
        results = BODIES[op.name](**given, **_attribute_values(op, variant))
    graph = builder.graph(op.onnx_type, list(inputs.values()), results)
    declared = [
        ir.Attr(name, attribute_type(kind), None)
        for name, kind in op.arguments
        if name in op.attributes and name not in variant.absent
    ]
    return ir.Function(DOMAIN, op.onnx_type, graph=graph, attributes=declared)


def _attribute_values(op: FusedOp, variant: Variant) -> dict[str, Any]:
    strings = dict(variant.strings)
    values: dict[str, Any] = {}
    for name, kind in op.arguments:
        if name not in op.attributes:
            continue
        if name in variant.absent:
            values[name] = None
        elif kind == "str":
            values[name] = strings[name]
        else:
            values[name] = attribute(name, float if kind.startswith("float") else int)
    return values


__all__ = ["BODIES", "DOMAIN", "OPSET", "VERSION", "Variant", "local_function"]
