"""Fixtures of the kernel tests."""

from __future__ import annotations

import numpy as np
import pytest

import hybridge.kernels
from hybridge.artifacts.errors import ArtifactError

from . import harness


def _levels() -> tuple[str, ...]:
    try:
        return harness.machine_levels()
    except ArtifactError:
        return ()


@pytest.fixture(autouse=True)
def _library() -> None:
    try:
        hybridge.kernels.library_path()
    except ArtifactError as error:
        pytest.skip(f"no kernel library: {error.message}")


@pytest.fixture(params=_levels() or ("plain",))
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction-set level of this machine; kernels made in the test use it."""
    monkeypatch.setenv("HYBRIDGE_KERNEL_LEVEL", request.param)
    return str(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261130)
