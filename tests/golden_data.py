"""The golden checkpoints: models, inputs and the values that a right implementation computes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridge.models.checkpoint import Checkpoint, load_state
from hybridge.models.config import load_config
from hybridge.models.model import HybridModel

FOLDER = Path(__file__).parent / "data" / "golden"
KIMI_K3 = ("kimi-k3.1-tiny", "kimi-k3.1-tiny-mxfp4", "kimi-k3-tiny")
EVERY = (*KIMI_K3, "kimi-linear-tiny")


@cache
def golden_model(name: str, dtype: torch.dtype = torch.float32) -> HybridModel:
    """The eager model of a golden checkpoint, computing in `dtype`."""
    config = load_config(FOLDER / name)
    model = HybridModel(config)
    model.load_state_dict(load_state(Checkpoint.open(FOLDER / name), config))
    return model.to(dtype)


@cache
def golden_values(name: str) -> dict[str, Tensor]:
    """`input_ids`, `prefill_length`, `logits` and, for K3.x, the tensors of every layer."""
    return load_file(FOLDER / name / "golden.safetensors")
