"""Runs one ``hybridge`` operator through onnxruntime, as a one-node model."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import hybridge.kernels

from . import recording

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ELEMENT = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    BFLOAT16: TensorProto.BFLOAT16,
}
_RECORDING = recording.Recording()
LEVELS = ("plain", "avx2", "avx512", "avx512_bf16")


def machine_levels() -> tuple[str, ...]:
    """The instruction-set levels this machine has, lowest first."""
    function = ctypes.CDLL(str(hybridge.kernels.library_path())).hybridge_kernel_level
    function.restype = ctypes.c_char_p
    best = function().decode()
    return LEVELS[: LEVELS.index(best) + 1]


def bf16(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float32).astype(BFLOAT16)


def f64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype(np.float32).astype(np.float64)


def i32(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)


def _ort_value(array: np.ndarray) -> onnxruntime.OrtValue:
    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16), TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _session(
    op: str,
    inputs: Mapping[str, np.ndarray | None],
    outputs: Mapping[str, np.dtype],
    attributes: Mapping[str, object],
    threads: int,
) -> onnxruntime.InferenceSession:
    names = [name if array is not None else "" for name, array in inputs.items()]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node(op, names, list(outputs), domain="hybridge", **attributes)
    graph = helper.make_graph(
        [node],
        op,
        [
            helper.make_tensor_value_info(name, ELEMENT[array.dtype], [None] * array.ndim)
            for name, array in inputs.items()
            if array is not None
        ],
        [helper.make_tensor_value_info(name, ELEMENT[d], None) for name, d in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("hybridge", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    hybridge.kernels.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


class Operator:
    """One operator with fixed input types; call it with arrays of those types.

    Args:
        op: the operator's ONNX name.
        inputs: an example of each input by name, in order; None leaves an optional one out.
        outputs: element type of each output by name, in order.
        alias: output name -> input name, for outputs that are the input's memory.
    """

    def __init__(
        self,
        op: str,
        inputs: Mapping[str, np.ndarray | None],
        outputs: Mapping[str, object],
        *,
        alias: Mapping[str, str] | None = None,
        threads: int = 2,
        **attributes: object,
    ) -> None:
        self.alias = dict(alias or {})
        self.outputs = {name: np.dtype(dtype) for name, dtype in outputs.items()}
        self.op, self.attributes = op, attributes
        self.session = _session(op, inputs, self.outputs, attributes, threads)

    def __call__(self, inputs: Mapping[str, np.ndarray | None]) -> list[np.ndarray]:
        """The outputs that alias nothing; aliased inputs are changed in place."""
        if not _RECORDING:
            return self._run(inputs)
        call = recording.entry(self.op, self.attributes, inputs, self.outputs, self.alias, ELEMENT)
        try:
            results = self._run(inputs)
        except Exception:
            _RECORDING.add(call, failed=True)
            raise
        _RECORDING.add(call, failed=False)
        return results

    def _run(self, inputs: Mapping[str, np.ndarray | None]) -> list[np.ndarray]:
        binding = self.session.io_binding()
        values = {k: _ort_value(a) for k, a in inputs.items() if a is not None}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.outputs:
            if name in self.alias:
                binding.bind_ortvalue_output(name, values[self.alias[name]])
            else:
                binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        results = binding.get_outputs()
        return [
            result.numpy()
            for name, result in zip(self.outputs, results, strict=True)
            if name not in self.alias
        ]


def run(
    op: str,
    inputs: Mapping[str, np.ndarray | None],
    outputs: Mapping[str, object],
    *,
    alias: Mapping[str, str] | None = None,
    threads: int = 2,
    **attributes: object,
) -> list[np.ndarray]:
    """Builds the operator and calls it once; see ``Operator``."""
    return Operator(op, inputs, outputs, alias=alias, threads=threads, **attributes)(inputs)


def block_tables(
    rng: np.random.Generator, lengths: Sequence[int], block: int, *, spare: int = 1, pad: int = -7
) -> tuple[np.ndarray, int]:
    """A block table of shuffled ids for sequences of these lengths, and the number of blocks.

    Entries beyond a sequence's length hold ``pad``, which no operator may read.
    """
    needed = [-(-length // block) for length in lengths]
    total = sum(needed) + spare
    ids = rng.permutation(total)
    table = np.full((len(lengths), max([*needed, 1])), pad, np.int32)
    start = 0
    for row, count in enumerate(needed):
        table[row, :count] = ids[start : start + count]
        start += count
    return table, max(total, 1)


__all__ = [
    "BFLOAT16",
    "ELEMENT",
    "LEVELS",
    "Operator",
    "bf16",
    "block_tables",
    "f64",
    "i32",
    "machine_levels",
    "onnx",
    "run",
]
