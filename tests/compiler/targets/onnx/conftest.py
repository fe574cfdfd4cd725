"""Small models with random weights, traced and emitted once a test process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

import hybridge.kernels
from hybridge.artifacts.errors import ArtifactError
from hybridge.compiler.pipeline import run_pipeline
from hybridge.compiler.targets.onnx.emit import EmittedGraph, emit_onnx
from hybridge.compiler.trace import TracedPhase, trace
from hybridge.ir.derived import materialise
from hybridge.models.batch import PHASES
from hybridge.models.config import ModelConfig
from hybridge.models.model import HybridModel
from hybridge.models.presets import preset, scale
from hybridge.models.session import EagerSession


@dataclass(frozen=True)
class Emitted:
    config: ModelConfig
    model: HybridModel
    traced: dict[str, TracedPhase]
    stored: dict[str, torch.dtype]
    graphs: dict[str, EmittedGraph]


def random_model(config: ModelConfig, dtype: torch.dtype) -> HybridModel:
    """Random weights; matrices are representable in `dtype`."""
    torch.manual_seed(0)
    model = HybridModel(config)
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.uint8:
            low, high = (118, 126) if name.endswith("scale") else (0, 256)
            parameter.data = torch.randint(low, high, parameter.shape, dtype=torch.uint8)
        else:
            values = torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5
            near_one = name.endswith("norm.weight")
            parameter.data = (values + near_one).to(dtype).to(torch.float32)
    return model.eval()


def emit_model(config: ModelConfig, dtype: torch.dtype, *, passes: bool) -> Emitted:
    model = random_model(config, dtype)
    traced = [trace(config, phase, block_size=16) for phase in PHASES]
    proofs: dict[str, Any] = {}
    for phase in traced if passes else ():
        run_pipeline(phase.graph_module, phase.phase, config, weights=phase.weights, proofs=proofs)
    stored = {
        name: parameter.dtype if parameter.dtype is torch.uint8 else dtype
        for name, parameter in model.named_parameters()
    }
    graphs = emit_onnx(traced, stored)
    return Emitted(config, model, {phase.phase: phase for phase in traced}, stored, graphs)


# Name -> preset, layers, weights' type, experts in MXFP4, whether the passes run.
MODELS: dict[str, tuple[str, int, torch.dtype, bool, bool]] = {
    "k3.1-as-traced": ("kimi-k3.1-tiny", 4, torch.float32, False, False),
    "k3.1-fused-bf16-mxfp4": ("kimi-k3.1-tiny", 4, torch.bfloat16, True, True),
    "linear-fused-bf16": ("kimi-linear-tiny", 2, torch.bfloat16, False, True),
}


@pytest.fixture(scope="session", params=MODELS)
def emitted(request: pytest.FixtureRequest) -> Emitted:
    """Each model in turn."""
    name, layers, dtype, mxfp4, passes = MODELS[request.param]
    config = scale(preset(name), layers=layers, mxfp4=mxfp4)
    return emit_model(config, dtype, passes=passes)


class GraphSession(EagerSession):
    """The eager session's bookkeeping, with the graphs in onnxruntime.

    Args:
        native: with our library; without it, the graphs run on the bodies that they carry.
    """

    def __init__(self, emitted: Emitted, folder: Any, *, native: bool, **sizes: int) -> None:
        super().__init__(emitted.model, **sizes)
        self.native = native
        self.sessions = {
            phase: self._load(emitted, graph, folder) for phase, graph in emitted.graphs.items()
        }

    def _load(
        self, emitted: Emitted, graph: EmittedGraph, folder: Any
    ) -> onnxruntime.InferenceSession:
        parameters = dict(emitted.model.named_parameters())
        (folder / "weights").touch()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
        if self.native:
            hybridge.kernels.register(options)
        self.held = getattr(self, "held", [])
        names, values = [], []
        for weight in graph.weights:
            value = materialise(weight.name, graph.recipes, lambda name: parameters[name].data)
            names.append(weight.name)
            values.append(ort_value(value.to(weight.dtype)))
        self.held.append(values)
        options.add_external_initializers(names, values)
        return onnxruntime.InferenceSession(graph.model, options)

    def step(self, new_tokens: list[Tensor], phase: str = "prefill", padding: int = 0) -> Tensor:
        feeds = {name: value.numpy() for name, value in self.batch(new_tokens, padding).items()}
        feeds |= {name: value.numpy() for name, value in self.caches.items()}
        session = self.sessions[phase]
        wanted = {item.name for item in session.get_inputs()}
        logits, *caches = session.run(None, {k: v for k, v in feeds.items() if k in wanted})
        self.caches = {
            name: torch.from_numpy(value) for name, value in zip(self.caches, caches, strict=True)
        }
        self.advance(new_tokens)
        return torch.from_numpy(logits)


def ort_value(value: Tensor) -> onnxruntime.OrtValue:
    value = value.detach().contiguous()
    if value.dtype is torch.bfloat16:
        bits = value.view(torch.uint16).numpy()
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            bits, onnx.TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(value.numpy()))


@pytest.fixture(params=["stock", "native"])
def session(
    request: pytest.FixtureRequest,
    emitted: Emitted,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> GraphSession:
    """Three sequences of up to 40 tokens, without our library and with it."""
    # Kernels for bf16 machines round the activations of a long prefill too: another tolerance.
    monkeypatch.setenv("HYBRIDGE_KERNEL_LEVEL", "plain")
    if request.param == "native" and not native_library():
        pytest.skip("the native library is not built")
    return GraphSession(emitted, tmp_path, native=request.param == "native", rows=3, max_context=40)


def native_library() -> bool:
    try:
        hybridge.kernels.library_path()
    except ArtifactError:
        return False
    return True
