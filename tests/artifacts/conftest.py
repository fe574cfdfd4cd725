from __future__ import annotations

from pathlib import Path

import pytest

from .samples import write_sample


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "artifact")
