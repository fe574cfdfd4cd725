"""The benchmark model on every side: hybridge's artifact, and PyTorch and onnxruntime in their best forms.

A side offers a decode step of `rows` sequences with `context` tokens cached, and a prefill of one prompt in chunks.
Caches hold random values: nobody's speed depends on them, and a context of 64k tokens need not be computed first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from baselines import CHUNK, plain_ops
from hybridge.compiler.reference import eager_model
from hybridge.models.batch import Phase
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import load_config
from hybridge.models.model import HybridModel
from hybridge.models.session import EagerSession
from hybridge.runner import load
from hybridge.runner.batch import Row, build_batch
from hybridge.runner.model import Model
from machine import TUNED

BLOCK = 64
PREFILL_CHUNK = 512
_SPARE = 64  # tokens of room after the context
assert PREFILL_CHUNK % CHUNK == 0

Step = Callable[[], object]


class Side(Protocol):
    """One way to run the model."""

    name: str

    def decode(self, rows: int, context: int) -> Step: ...

    def prefill(self, tokens: int) -> Step: ...


class Compiled:
    """An artifact in the runner: ours, or with `native` off the plain ONNX graph on onnxruntime alone."""

    def __init__(self, name: str, artifact: Path, *, native: bool = True) -> None:
        self.name = name
        self._artifact, self._native = artifact, native

    def decode(self, rows: int, context: int) -> Step:
        return self.decode_on_model(rows, context)[1]

    def decode_on_model(self, rows: int, context: int) -> tuple[Model, Step]:
        """The step, and the loaded model that it runs on."""
        model = self._load(rows, context + _SPARE)
        places = _places(rows, context + _SPARE)
        tokens = _tokens(rows, model.vocab_size)
        entries = [Row([tokens[i]], context, places[i], i) for i in range(rows)]
        batch = build_batch(entries, BLOCK)
        return model, lambda: model.run("decode", batch)

    def prefill(self, tokens: int) -> Step:
        model = self._load(1, tokens)
        (places,) = _places(1, tokens)
        ids = _tokens(tokens, model.vocab_size)
        batches = [
            build_batch([Row(ids[at : at + PREFILL_CHUNK], at, places, 0)], BLOCK)
            for at in range(0, tokens, PREFILL_CHUNK)
        ]
        return lambda: [model.run("prefill", batch) for batch in batches]

    def _load(self, rows: int, context: int) -> Model:
        engine = load(
            self._artifact,
            slots=rows,
            max_context=context,
            threads=torch.get_num_threads(),
            prepack=not self._native,
            use_native=self._native,
        )
        for state in engine.model.states.values():
            _fill(state)
        return engine.model


class Eager:
    """The eager model in plain PyTorch."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        self.name = f"eager {_short(dtype)}"
        self.model = eager_model(Checkpoint.open(checkpoint), load_config(checkpoint)).to(dtype)

    def decode(self, rows: int, context: int) -> Step:
        batch, caches = decode_inputs(self.model, rows, context)
        return self._step("decode", batch, caches)

    def prefill(self, tokens: int) -> Step:
        parts = prefill_inputs(self.model, tokens)
        steps = [self._step("prefill", *part) for part in parts]
        return lambda: [step() for step in steps]

    def _step(self, phase: Phase, batch: dict[str, Tensor], caches: dict[str, Tensor]) -> Step:
        def step() -> object:
            with plain_ops():
                return self.model(phase, **batch, caches=caches)

        return step


class Inductor(Eager):
    """The same through TorchInductor: torch.compile, or ahead of time; contexts vary, batch and chunk are static.

    As given, with Inductor's defaults. Tuned, with frozen weights, so that oneDNN packs them, and where a row decodes
    alone with its experts' weights gathered, which Inductor fuses into the products (elsewhere that is slower).
    """

    def __init__(
        self,
        checkpoint: Path,
        dtype: torch.dtype,
        *,
        package: Path | None = None,
        tuned: bool = False,
    ) -> None:
        super().__init__(checkpoint, dtype)
        kind = "torch.compile" if package is None else "AOTInductor"
        self.name = f"{kind} {_short(dtype)}{f' {TUNED}' if tuned else ''}"
        self._package, self._tuned = package, tuned
        self._key: tuple[Phase, int] | None = None
        self._function: Callable[..., object] | None = None

    def _step(self, phase: Phase, batch: dict[str, Tensor], caches: dict[str, Tensor]) -> Step:
        key = (phase, len(batch["token_ids"]))
        gather = self._tuned and key == ("decode", 1)
        if key != self._key:
            # One at a time: each holds a packed copy of every weight.
            self._function = None
            forget()
            build = self._compile if self._package is None else self._ahead_of_time
            with plain_ops(gather_experts=gather):
                self._key, self._function = key, build(_OnePhase(self.model, phase), batch, caches)
        function = self._function
        assert function is not None

        def step() -> object:
            with plain_ops(gather_experts=gather):
                return function(batch, caches)

        return step

    def _compile(
        self, module: nn.Module, batch: dict[str, Tensor], caches: dict[str, Tensor]
    ) -> Callable[..., Tensor]:
        torch._dynamo.mark_dynamic(batch["block_table"], 1)
        for name in caches:
            if "cache" in name:
                torch._dynamo.mark_dynamic(caches[name], 0)
        function: Callable[..., Tensor] = torch.compile(module)
        with self._settings():
            function(batch, caches)
        return function

    def _ahead_of_time(
        self, module: nn.Module, batch: dict[str, Tensor], caches: dict[str, Tensor]
    ) -> Callable[..., Tensor]:
        columns, blocks = (torch.export.Dim(name, min=2, max=1 << 20) for name in ("M", "N"))
        shapes = (
            {name: {1: columns} if name == "block_table" else {} for name in batch},
            {name: {0: blocks} if "cache" in name else {} for name in caches},
        )
        program = torch.export.export(module, (batch, caches), dynamic_shapes=shapes, strict=False)
        assert self._package is not None
        with self._settings():
            path = torch._inductor.aoti_compile_and_package(
                program, package_path=str(self._package)
            )
        loaded: Callable[..., Tensor] = torch._inductor.aoti_load_package(path)
        return loaded

    def _settings(self) -> Any:
        return torch._inductor.config.patch(freezing=self._tuned)


class _OnePhase(nn.Module):
    def __init__(self, model: HybridModel, phase: Phase) -> None:
        super().__init__()
        self.wrapped, self.phase = model, phase

    def forward(self, batch: dict[str, Tensor], caches: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.wrapped(self.phase, **batch, caches=caches)
        return logits


def decode_inputs(
    model: HybridModel, rows: int, context: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The batch and random caches of one decode step."""
    session = _session(model, rows, context + _SPARE)
    session.lengths = [context] * rows
    ids = torch.tensor(_tokens(rows, model.config.vocab_size), dtype=torch.int32)
    return session.batch(list(ids.split(1))), session.caches


def prefill_inputs(
    model: HybridModel, tokens: int
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The batches of a prompt's chunks, over the same caches; each reads the columns that it needs."""
    session = _session(model, 1, tokens)
    ids = torch.tensor(_tokens(tokens, model.config.vocab_size), dtype=torch.int32)
    found = []
    for chunk in ids.split(PREFILL_CHUNK):
        batch = session.batch([chunk])
        session.advance([chunk])
        columns = -(-session.lengths[0] // BLOCK)
        batch["block_table"] = batch["block_table"][:, :columns].contiguous()
        batch["logits_index"] = torch.tensor([len(chunk) - 1], dtype=torch.int32)
        found.append((batch, session.caches))
    return found


def _session(model: HybridModel, rows: int, context: int) -> EagerSession:
    session = EagerSession(model, rows=rows, max_context=context, block_size=BLOCK)
    for cache in session.caches.values():
        cache.normal_()
    return session


def _tokens(count: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(0).integers(0, vocabulary, count).tolist()


def _places(rows: int, context: int) -> np.ndarray:
    """Blocks of every row, shuffled: [rows, blocks]."""
    blocks = -(-context // BLOCK)
    return np.random.default_rng(1).permutation(rows * blocks).astype(np.int32).reshape(rows, -1)


def _fill(state: np.ndarray, piece: int = 1 << 20) -> None:
    """Random values in place, the same ones in every piece: making gigabytes of new ones is slow."""
    flat = state.reshape(-1)
    values = np.random.default_rng(2).standard_normal(piece, dtype=np.float32)
    if flat.dtype == np.uint16:  # bfloat16 bits
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    for start in range(0, len(flat), piece):
        part = flat[start : start + piece]
        part[:] = values[: len(part)]


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def forget() -> None:
    """Give memory back."""
    torch._dynamo.reset()
    gc.collect()
