"""onnxruntime sessions over mapped weights, and calls that copy no weight and no cache.

What onnxruntime 1.32 really does, measured (weights of 256 MB, resident memory after loading):

* ``add_external_initializers`` and a file that it reads itself: each session keeps a copy.
* ``add_initializer``: used in place, if prepacking is off. With it on, each session keeps a packed
  copy of every matrix that a standard MatMul or Gemm reads; that is up to 2 times faster for 2 to
  16 rows, and as fast for one row and for many. Hence off, unless the caller wants it.
* ``add_initializer`` compares neither shape nor type with the graph, so that is done here.
* The file that an external initializer names must exist, even if never read (`GRAPH_WEIGHTS`).
* Folding of constants reads that file, so weights that are folded are handed over as a copy; if
  the graph does not load even so (operators that were inlined), small weights too, and then all.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.artifact import Artifact
from hybridge.artifacts.dtypes import element_type
from hybridge.artifacts.errors import ArtifactError, RunError
from hybridge.artifacts.manifest import PhaseSpec
from hybridge.artifacts.onnx_initializers import (
    GRAPH_WEIGHTS,
    GraphWeight,
    external_initializers,
    folded_initializers,
)

SMALL_WEIGHT_BYTES = 1 << 20
_FATAL_ONLY = 4  # every error is raised too; onnxruntime's own log would show it twice
_NATIVE_TYPES = frozenset(
    {"float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "bool"}
)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SessionSettings:
    """How sessions are made.

    Attributes:
        threads: most threads of one operator; None lets onnxruntime choose.
        prepack: let onnxruntime keep packed copies of weights.
        native: register the kernel library.
    """

    threads: int | None = None
    prepack: bool = False
    native: bool = True


def ort_value(array: Array, dtype: str) -> Any:
    """An OrtValue over the memory of ``array``, which must outlive it."""
    import onnxruntime

    if dtype in _NATIVE_TYPES:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    number = element_type(dtype).onnx
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)


class WeightValues:
    """The weights as OrtValues over mapped memory, made once and shared by all sessions."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._values: dict[tuple[str, str], Any] = {}
        self._arrays: dict[str, Array] = {}
        self.copied: set[str] = set()

    def value(self, weight: GraphWeight, where: str) -> Any:
        """The value for one initializer.

        Raises:
            ArtifactError: no such weight, or one of another shape or type than the graph declares.
        """
        key = (weight.name, weight.dtype)
        if key not in self._values:
            self._check(weight, where)
            self._values[key] = ort_value(self._array(weight.name), weight.dtype)
        return self._values[key]

    def size(self, weight: GraphWeight) -> int:
        """Bytes of a weight."""
        return self._artifact.weights[weight.name].length

    def _array(self, name: str) -> Array:
        if name not in self._arrays:
            array = self._artifact.weight(name)
            if not array.flags.aligned:  # a checkpoint whose header has an odd length
                array = array.copy()
                self.copied.add(name)
            self._arrays[name] = array
        return self._arrays[name]

    def _check(self, weight: GraphWeight, where: str) -> None:
        entry = self._artifact.weights.get(weight.name)
        if entry is None:
            raise ArtifactError(
                f"{where}: weight {weight.name!r} is not listed in weights.json",
                "compile the artifact again",
            )
        # Types that differ in name only (float8 carried as uint8) have the same storage.
        same = element_type(entry.dtype).storage == element_type(weight.dtype).storage
        if entry.shape != weight.shape or not same:
            raise ArtifactError(
                f"{where}: weight {weight.name!r} is {weight.dtype} {list(weight.shape)} in the "
                f"graph, but {entry.dtype} {list(entry.shape)} in weights.json",
                "compile the artifact again",
            )


_open_sessions: weakref.WeakSet[PhaseSession] = weakref.WeakSet()


def _keep_sessions_of_parent() -> None:
    """In a forked child: let no session end, for onnxruntime then waits for its pool's threads.

    A child has none of its parent's threads. The reference is one that nothing gives back, not
    even the interpreter when it ends.
    """
    for session in _open_sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_sessions_of_parent)


class PhaseSession:
    """One graph, with its states bound in place and its index inputs kept between calls.

    Args:
        artifact: the checked artifact.
        phase: "prefill" or "decode".
        weights: shared by the sessions.
        states: memory of every state, by name, shared by the sessions.
        settings: how to make the session.

    Raises:
        ArtifactError: the graph cannot be loaded, or asks for weights that are not there.
    """

    def __init__(
        self,
        artifact: Artifact,
        phase: str,
        weights: WeightValues,
        states: Mapping[str, Array],
        settings: SessionSettings,
    ) -> None:
        self.phase = phase
        self._process = os.getpid()
        self._weights = weights
        self._session = _open_session(artifact, phase, weights, settings)
        self._binding = self._session.io_binding()
        self._inputs = {item.name: item.shape for item in self._session.get_inputs()}
        self._buffers: dict[str, Array] = {}
        self._logits: Array | None = None
        self._values: dict[str, Any] = {}
        self._bind_states(artifact, states)
        _open_sessions.add(self)

    def _bind_states(self, artifact: Artifact, states: Mapping[str, Array]) -> None:
        outputs = {item.name for item in self._session.get_outputs()}
        expected = {f"{spec.name}_out" for spec in artifact.manifest.states} | {"logits"}
        if outputs - expected or "logits" not in outputs:
            raise ArtifactError(
                f"{self.phase} graph: outputs {sorted(outputs)}, expected logits and "
                "one <state>_out for each state",
                "compile the artifact again",
            )
        for spec in artifact.manifest.states:
            value = ort_value(states[spec.name], spec.dtype)
            self._values[spec.name] = value
            # The same memory as input and output: the graph updates it where it is.
            if spec.name in self._inputs:
                self._binding.bind_ortvalue_input(spec.name, value)
            if f"{spec.name}_out" in outputs:
                self._binding.bind_ortvalue_output(f"{spec.name}_out", value)

    def run(self, batch: Mapping[str, npt.NDArray[np.int32]], vocab_size: int) -> Array:
        """Run the graph on a batch; states change in place.

        Returns:
            Logits [L, vocab] fp32, in memory that the next call writes again.

        Raises:
            RunError: the graph failed; the states of the batch's sequences are then undefined. Or
                this is a child, forked after loading.
        """
        if os.getpid() != self._process:
            raise RunError(
                "the model was loaded before this process was forked, and its threads stayed behind",
                "load it in the child",
            )
        for name, values in batch.items():
            if name in self._inputs:
                self._put(name, values)
        logits = self._logits_buffer(len(batch["logits_index"]), vocab_size)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises its own kinds, by version
            raise RunError(
                f"the {self.phase} graph failed: {error}",
                "the sequences of this call are lost; add them again",
            ) from error
        return logits

    def _put(self, name: str, values: npt.NDArray[np.int32]) -> None:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == values.shape:
            np.copyto(buffer, values)
            return
        self._buffers[name] = buffer = np.ascontiguousarray(values, np.int32).copy()
        self._values[name] = ort_value(buffer, "int32")
        self._binding.bind_ortvalue_input(name, self._values[name])

    def _logits_buffer(self, rows: int, vocab_size: int) -> Array:
        if self._logits is None or self._logits.shape[0] != rows:
            self._logits = np.empty((rows, vocab_size), np.float32)
            self._values["logits"] = ort_value(self._logits, "float32")
            self._binding.bind_ortvalue_output("logits", self._values["logits"])
        return self._logits

    def output_pointers(self) -> set[int]:
        """Where the last call's outputs lie: for tests that no state was copied."""
        return {value.data_ptr() for value in self._binding.get_outputs()}


def _open_session(
    artifact: Artifact, phase: str, weights: WeightValues, settings: SessionSettings
) -> Any:
    spec = artifact.manifest.phases[phase]
    model = artifact.read(spec.graph)
    wanted = external_initializers(model, spec.graph)
    values = {weight.name: weights.value(weight, spec.graph) for weight in wanted}
    folded = folded_initializers(model, spec.graph) & values.keys()
    small = {weight.name for weight in wanted if weights.size(weight) <= SMALL_WEIGHT_BYTES}
    attempts = [sorted(folded), sorted(folded | small), sorted(values)]
    for copied in attempts:
        try:
            session = _try_session(artifact, phase, model, values, copied, settings)
        except ArtifactError:
            raise
        except Exception as error:  # onnxruntime raises its own kinds, by version
            if "xternal" in str(error) and copied is not attempts[-1]:
                continue
            raise _load_error(spec, error, settings) from error
        weights.copied.update(copied)
        return session
    raise AssertionError("the last attempt returns or raises")


def _try_session(
    artifact: Artifact,
    phase: str,
    model: bytes,
    values: Mapping[str, Any],
    copied: Sequence[str],
    settings: SessionSettings,
) -> Any:
    import onnxruntime

    options = _options(phase, settings)
    folder = artifact.path(GRAPH_WEIGHTS).parent if values else artifact.root
    # The graph is given as the very bytes that were hashed; this says where "weights" lies.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    given = set(copied)
    for name in values.keys() - given:
        options.add_initializer(name, values[name])
    if copied:
        options.add_external_initializers(list(copied), [values[name] for name in copied])
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _options(phase: str, settings: SessionSettings) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.inter_op_num_threads = 1
    # Allocation plans are kept for every set of shapes ever seen; prefill sees no end of them.
    options.enable_mem_pattern = phase != "prefill"
    if settings.threads is not None:
        # Threads past the processors only take turns; some thousands never finish a step.
        options.intra_op_num_threads = min(settings.threads, os.cpu_count() or 1)
    # Between steps its threads would spin on, and take the cores from whoever samples or serves.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not settings.prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if settings.native:
        from hybridge import kernels

        kernels.register(options)
    return options


def _load_error(spec: PhaseSpec, error: Exception, settings: SessionSettings) -> ArtifactError:
    name = PurePosixPath(spec.graph).name
    remedy = "compile the artifact again with this version"
    if not settings.native:
        remedy = "use the native kernels (install the hybridge wheel), or compile again"
    return ArtifactError(f"{name}: onnxruntime cannot load the graph: {error}", remedy)
