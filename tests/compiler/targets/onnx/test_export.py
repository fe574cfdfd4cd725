"""Small programs through the whole lowering: ops that need decomposition, and errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from hybridge.artifacts.errors import CompileError
from hybridge.compiler.targets.onnx import emit
from hybridge.compiler.targets.onnx.emit import emit_onnx
from hybridge.compiler.trace import TracedPhase
from hybridge.models.caches import CacheShape


class Program(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, token_ids: Tensor, latent_cache_0: Tensor) -> Tensor:
        x = token_ids.float().unsqueeze(-1)
        torch.ops.hybridge.paged_write(latent_cache_0, x.unsqueeze(-1), token_ids)
        return self.function(x)


def traced(function: Callable[[Tensor], Tensor]) -> TracedPhase:
    inputs = (torch.arange(3, dtype=torch.int32), torch.zeros(2, 2, 1, 1))
    program = torch.export.export(Program(function), inputs, strict=False)
    cache = CacheShape("latent_cache_0", 0, "latent", (1, 1))
    return TracedPhase("prefill", program, ("token_ids", "latent_cache_0"), (cache,), {})


def run(phase: TracedPhase) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(emit_onnx([phase], {})["prefill"].model)
    ids = np.arange(3, dtype=np.int32)
    cache = np.zeros((2, 2, 1, 1), np.float32)
    return session.run(None, {"token_ids": ids, "latent_cache_0": cache})


def test_logits_and_the_new_cache():
    logits, cache = run(traced(lambda x: x + 1))
    assert logits.flatten().tolist() == [1, 2, 3]
    assert cache.flatten().tolist() == [0, 1, 2, 0]


def test_an_op_without_translation_is_decomposed(monkeypatch):
    kept = emit.translation_table()
    del kept[torch.ops.aten.square.default]
    monkeypatch.setattr(emit, "translation_table", lambda: kept)
    logits, cache = run(traced(lambda x: x.square() + 1))
    assert logits.flatten().tolist() == [1, 2, 5]
    assert cache.flatten().tolist() == [0, 1, 2, 0]


def test_what_cannot_be_translated_is_named():
    with pytest.raises(CompileError, match="bessel") as refused:
        emit_onnx([traced(torch.special.modified_bessel_i1)], {})
    assert "aten.py" in refused.value.remedy


def test_one_op_has_one_body():
    def both(x: Tensor) -> Tensor:
        bounded = torch.ops.hybridge.situ(x, x, beta=4.0, linear_beta=25.0)
        return bounded + torch.ops.hybridge.situ(x, x, beta=4.0, linear_beta=None)

    with pytest.raises(CompileError, match="both Situ but differ"):
        emit_onnx([traced(both)], {})
