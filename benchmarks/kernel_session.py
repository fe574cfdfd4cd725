"""One kernel alone: a graph of one node with its inputs bound, and the case that compares it with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

import hybridge.kernels

Arrays = dict[str, np.ndarray]
Inputs = Mapping[str, np.ndarray | None]  # None leaves an optional one out
_ELEMENT = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(ml_dtypes.bfloat16): TensorProto.BFLOAT16,
}


def bf16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16)


def i32(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


class Kernel:
    """One operator with its inputs bound; aliased outputs share the input's memory."""

    def __init__(
        self,
        op: str,
        inputs: Inputs,
        outputs: Mapping[str, str | None],
        *,
        ids_output: str = "",
        **attributes: object,
    ) -> None:
        """outputs: name -> the input it shares memory with, or None."""
        names = [name if array is not None else "" for name, array in inputs.items()]
        arrays = {name: array for name, array in inputs.items() if array is not None}
        node = helper.make_node(op, names, list(outputs), domain="hybridge", **attributes)
        kinds = {n: TensorProto.INT32 if n == ids_output else TensorProto.FLOAT for n in outputs}
        graph = helper.make_graph(
            [node],
            op,
            [
                helper.make_tensor_value_info(name, _ELEMENT[a.dtype], a.shape)
                for name, a in arrays.items()
            ],
            [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("hybridge", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Else its threads spin on after a run and take a core from what is timed next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        hybridge.kernels.register(options)
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        self.binding = self.session.io_binding()
        values = {name: self._value(array) for name, array in arrays.items()}
        for name, value in values.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, shared in outputs.items():
            if shared:
                self.binding.bind_ortvalue_output(name, values[shared])
            else:
                self.binding.bind_output(name, "cpu")

    @staticmethod
    def _value(array: np.ndarray) -> onnxruntime.OrtValue:
        if array.dtype == ml_dtypes.bfloat16:
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                array.view(np.uint16), TensorProto.BFLOAT16
            )
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)


@dataclass(frozen=True)
class Case:
    """A kernel against the same maths in PyTorch.

    Args:
        name: with its sizes.
        ours: the kernel.
        baselines: name -> the same maths; each is also compiled with torch.compile.
        read: bytes that must come from memory. operations: multiplications and additions.
        fp32: whether the operations are of fp32 numbers.
        compiled: whether torch.compile can do anything with the baselines.
    """

    name: str
    ours: Kernel
    baselines: Mapping[str, Callable[[], object]]
    read: float
    operations: float = 0.0
    fp32: bool = False
    compiled: bool = True
