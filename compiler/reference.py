"""The eager model with a checkpoint's weights: golden values for artifacts, and what `verify` compares with."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from hybridge.artifacts.golden import GoldenCase
from hybridge.models.batch import Phase
from hybridge.models.checkpoint import Checkpoint, load_state
from hybridge.models.config import ModelConfig
from hybridge.models.model import HybridModel
from hybridge.models.session import EagerSession
from hybridge.models.tensor_names import weight_sources

GOLDEN_PROMPT = 40
GOLDEN_DECODED = 8


def eager_model(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype = torch.float32
) -> HybridModel:
    """The eager model computing in `dtype`; packed experts stay packed.

    Raises:
        CheckpointError: the checkpoint does not fit the config.
    """
    with torch.device("meta"):
        model = HybridModel(config)
    state = load_state(checkpoint, config, dtype)
    floating = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in state.items()
    }
    model.load_state_dict(floating, assign=True)
    return model.requires_grad_(False)


def eager_bytes(config: ModelConfig) -> int:
    """Memory that the eager model's weights take in fp32."""
    return sum(
        source.numel * (1 if source.storage == "uint8" else 4) for source in weight_sources(config)
    )


def fits_in_memory(config: ModelConfig) -> bool:
    """Whether the eager model may be loaded here: at most half of the memory that is free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return eager_bytes(config) <= free // 2


def golden_case(
    model: HybridModel, *, prompt: int = GOLDEN_PROMPT, decoded: int = GOLDEN_DECODED
) -> GoldenCase:
    """Run the eager model on a prompt of fixed random tokens and continue it greedily.

    Args:
        prompt: tokens of the prompt. decoded: tokens to continue with.

    Returns:
        All tokens, the logits of every position, and the greedy continuation.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (prompt,), generator=generator)
    session = EagerSession(model, max_context=prompt + decoded)
    logits = [session.step([ids.to(torch.int32)])]
    tokens: list[Tensor] = []
    for _ in range(decoded):
        tokens.append(logits[-1][-1:].argmax(-1).to(torch.int32))
        logits.append(session.step([tokens[-1]], "decode"))
    continuation = torch.cat(tokens)
    return GoldenCase(
        token_ids=torch.cat([ids.to(torch.int32), continuation]).numpy(),
        prefill_length=prompt,
        logits=torch.cat(logits).to(torch.float32).numpy(),
        greedy_tokens=np.asarray(continuation.numpy(), np.int32),
    )


def check_values(model: HybridModel, phase: Phase, block_size: int) -> dict[str, Tensor]:
    """Inputs, caches with something in them, and weights: what a graph is run on between passes.

    Returns:
        A value for every graph input and every parameter, by name.
    """
    generator = torch.Generator().manual_seed(1)
    session = EagerSession(model, rows=3, max_context=40, block_size=block_size)

    def tokens(count: int) -> Tensor:
        ids = torch.randint(0, model.config.vocab_size, (count,), generator=generator)
        return ids.to(torch.int32)

    session.step([tokens(23), tokens(9), tokens(0)])
    counts = (1, 1, 1) if phase == "decode" else (3, 5, 1)
    batch = session.batch([tokens(count) for count in counts])
    return {**batch, **session.caches, **dict(model.named_parameters())}
