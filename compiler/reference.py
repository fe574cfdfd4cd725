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
from hybridge.models.layers import Linear
from hybridge.models.mla import HeadProduct
from hybridge.models.model import HybridModel
from hybridge.models.moe import Experts
from hybridge.models.session import EagerSession, evaluate
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


def rounding_effect(model: HybridModel, case: GoldenCase) -> float:
    """How far the logits move when matrix products round their activations, and paged caches their rows, to bf16.

    The measure for what a graph with bf16 activations may differ by: it rounds the same values, in another order.

    Args:
        model: the eager model; used as it is found, and left so.
        case: its tokens and exact logits.

    Returns:
        The largest difference of a logit over the case's tokens.
    """

    def round_input(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].to(torch.bfloat16).to(inputs[0].dtype), *inputs[1:])

    def round_row(module: torch.nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """A cache row's part, or the part of a projection that goes into the row as it is."""
        first = model.config.kv_lora_rank if isinstance(module, Linear) else 0
        kept, row = output[..., :first], output[..., first:]
        return torch.cat([kept, row.to(torch.bfloat16).to(output.dtype)], dim=-1)

    kinds = Linear | Experts | HeadProduct
    products = [module for module in model.modules() if isinstance(module, kinds)]
    handles = [module.register_forward_pre_hook(round_input) for module in products]
    rows = [
        module
        for name, module in model.named_modules()
        if name.endswith((".kv_a_layernorm", ".kv_a_proj_with_mqa", ".indexer.k_norm"))
    ]
    handles += [module.register_forward_hook(round_row) for module in rows]
    rounded = evaluate(model, torch.from_numpy(case.token_ids)).to(torch.float32).numpy()
    for handle in handles:
        handle.remove()
    assert case.logits is not None
    return float(np.abs(rounded - case.logits).max())


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
