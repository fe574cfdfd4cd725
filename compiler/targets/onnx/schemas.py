"""ONNX schemas of the vocabulary, generated from its registry: domain `hybridge`, version 1."""

from __future__ import annotations

import functools

import onnx.defs
import onnx_ir as ir

from hybridge.ops import FusedOp, vocabulary

DOMAIN = "hybridge"
VERSION = 1

# Matrix products may round their activations to bf16 where their weights are narrow (many rows, machines that
# multiply bf16 pairs). It is a permission for the native kernels, not part of an op's definition.
BF16_ACTIVATIONS = "bf16_activations"
ROUNDING_OPS = (
    "kda_decode",
    "kda_decode_packed",
    "linear",
    "linear_packed",
    "moe_experts",
    "moe_experts_packed",
    "moe_experts_mxfp4",
    "mla_absorb_query",
    "mla_expand_value",
)

_TENSOR_TYPES = [
    "tensor(float)",
    "tensor(bfloat16)",
    "tensor(float16)",
    "tensor(double)",
    "tensor(int32)",
    "tensor(int64)",
    "tensor(uint8)",
]

_ATTRIBUTE_TYPES = {
    "int": ir.AttributeType.INT,
    "bool": ir.AttributeType.INT,
    "float": ir.AttributeType.FLOAT,
    "float?": ir.AttributeType.FLOAT,
    "str": ir.AttributeType.STRING,
}

_ATTRIBUTE_KINDS = {
    ir.AttributeType.INT: onnx.defs.OpSchema.AttrType.INT,
    ir.AttributeType.FLOAT: onnx.defs.OpSchema.AttrType.FLOAT,
    ir.AttributeType.STRING: onnx.defs.OpSchema.AttrType.STRING,
}


def attribute_type(torch_type: str) -> ir.AttributeType:
    """The ONNX attribute type of a torch schema type, such as "float?"."""
    return _ATTRIBUTE_TYPES[torch_type]


def output_names(op: FusedOp) -> tuple[str, ...]:
    """An ONNX node's outputs: the op's own, then the new value of each tensor it mutates."""
    own = tuple(f"output_{place}" for place in range(op.output_count))
    return (*own, *(f"new_{name}" for name in op.mutated))


@functools.cache
def register_schemas() -> None:
    """Make the vocabulary known to onnx in this process; a second call does nothing."""
    for op in vocabulary.values():
        onnx.defs.register_schema(_schema(op))


def _schema(op: FusedOp) -> onnx.defs.OpSchema:
    inputs = [_input(name, kind) for name, kind in op.arguments if kind.startswith("Tensor")]
    outputs = [onnx.defs.OpSchema.FormalParameter(name, f"T_{name}") for name in output_names(op)]
    return onnx.defs.OpSchema(
        name=op.onnx_type,
        domain=DOMAIN,
        since_version=VERSION,
        doc=op.reference.__doc__ or "",
        inputs=inputs,
        outputs=outputs,
        type_constraints=[(item.type_str, _TENSOR_TYPES, "") for item in (*inputs, *outputs)],
        attributes=[
            onnx.defs.OpSchema.Attribute(
                name,
                _ATTRIBUTE_KINDS[attribute_type(kind)],
                required=not kind.endswith("?"),
            )
            for name, kind in op.arguments
            if name in op.attributes
        ]
        + [
            onnx.defs.OpSchema.Attribute(name, onnx.defs.OpSchema.AttrType.INT, required=False)
            for name in (BF16_ACTIVATIONS,)
            if op.name in ROUNDING_OPS
        ],
    )


def _input(name: str, kind: str) -> onnx.defs.OpSchema.FormalParameter:
    option = onnx.defs.OpSchema.FormalParameterOption
    return onnx.defs.OpSchema.FormalParameter(
        name,
        f"T_{name}",
        param_option=option.Optional if kind == "Tensor?" else option.Single,
    )
