from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from .samples import write_sample


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "artifact")


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """A block in which no file may grow past so many bytes: writing fails as it does on a full disk."""

    @contextmanager
    def limited(most_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
