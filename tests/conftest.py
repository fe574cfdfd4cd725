"""What the whole suite shares: hypothesis profiles, and one tiny model, made and compiled once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

import hybridge  # noqa: F401  (before any test imports torch, which torch-npu would break)
from made_once import made_once

# Shared machines stall: no example has a deadline. In CI the same examples run every time.
settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A random kimi-k3.1-tiny checkpoint of four layers (three KDA, one DSA); read only."""
    from hybridge.models.new_checkpoint import write_checkpoint
    from hybridge.models.presets import preset, scale

    def make(folder: Path) -> None:
        write_checkpoint(scale(preset("kimi-k3.1-tiny"), layers=4), folder, seed=0)

    return made_once(tmp_path_factory, worker_id, "tiny-checkpoint", make)


@pytest.fixture(scope="session")
def tiny_artifact(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Path:
    """`tiny_checkpoint` compiled for the CPU with every pass, weights by reference; read only."""
    from hybridge.compiler import compile_model

    def make(folder: Path) -> None:
        compile_model(str(tiny_checkpoint), folder, target="cpu", weights="reference")

    return made_once(tmp_path_factory, worker_id, "tiny-artifact", make)
