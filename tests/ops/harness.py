"""Runs one op in stock onnxruntime: a node of the domain `hybridge` and its function's body."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor

from hybridge.compiler.targets.onnx.functions import DOMAIN, OPSET, VERSION, Variant, local_function
from hybridge.compiler.targets.onnx.schemas import output_names
from hybridge.ops import FusedOp

_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int32: onnx.TensorProto.INT32,
    torch.uint8: onnx.TensorProto.UINT8,
}


def run_body(
    op: FusedOp,
    args: tuple[Tensor | None, ...],
    attributes: dict[str, Any],
    *,
    told_types: bool,
) -> list[Tensor]:
    """The outputs of `op` as its ONNX function computes them.

    Args:
        told_types: the body may leave out casts of inputs that are fp32.
    """
    session = _session(op, args, attributes, told_types)
    names = op.tensor_arguments
    binding = session.io_binding()
    held = []
    for name, value in zip(names, args, strict=True):
        if value is not None:
            held.append(_ort_value(value))
            binding.bind_ortvalue_input(name, held[-1])
    for name in output_names(op):
        binding.bind_output(name, "cpu")
    session.run_with_iobinding(binding)
    return [_tensor(value) for value in binding.get_outputs()]


def _session(
    op: FusedOp, args: tuple[Tensor | None, ...], attributes: dict[str, Any], told_types: bool
) -> onnxruntime.InferenceSession:
    given = {k: v for k, v in zip(op.tensor_arguments, args, strict=True) if v is not None}
    present = {name: value for name, value in attributes.items() if value is not None}
    absent = frozenset((*op.tensor_arguments, *attributes)) - frozenset((*given, *present))
    strings = tuple((name, value) for name, value in present.items() if isinstance(value, str))
    fp32 = frozenset(name for name, value in given.items() if value.dtype is torch.float32)
    variant = Variant(absent, strings, fp32 if told_types else frozenset())
    function = ir.serde.serialize_function(local_function(op, variant))
    node = onnx.helper.make_node(
        op.onnx_type,
        [name if name in given else "" for name in op.tensor_arguments],
        list(output_names(op)),
        domain=DOMAIN,
        **present,
    )
    graph = onnx.helper.make_graph(
        [node],
        "one_op",
        [
            onnx.helper.make_tensor_value_info(name, _TYPES[value.dtype], list(value.shape))
            for name, value in given.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in output_names(op)],
    )
    model = onnx.helper.make_model(
        graph,
        functions=[function],
        opset_imports=[
            onnx.helper.make_opsetid("", OPSET),
            onnx.helper.make_opsetid(DOMAIN, VERSION),
        ],
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def _ort_value(value: Tensor) -> onnxruntime.OrtValue:
    if value.dtype is torch.bfloat16:
        bits = value.contiguous().view(torch.uint16).numpy()
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            bits, onnx.TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(value.contiguous().numpy())


def _tensor(value: onnxruntime.OrtValue) -> Tensor:
    if value.element_type() != onnx.TensorProto.BFLOAT16:
        return torch.from_numpy(value.numpy())
    # numpy has no bf16: read the bits.
    count = math.prod(value.shape())
    bits = np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * count), np.uint16)
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).reshape(value.shape())
