"""hybridge.runner: load an artifact and run it, with numpy and onnxruntime and nothing more."""

from __future__ import annotations

from hybridge.runner.engine import Engine, TokenEvent
from hybridge.runner.loading import load
from hybridge.runner.sampling import SamplingOptions

__all__ = ["Engine", "SamplingOptions", "TokenEvent", "load"]
