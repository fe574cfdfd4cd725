"""Folders that all test workers share: what is dear to make is made by the first that asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(
    factory: pytest.TempPathFactory, worker: str, name: str, make: Callable[[Path], object]
) -> Path:
    """A folder that the first of all test workers makes and the others wait for."""
    base = factory.getbasetemp()
    folder = (base if worker == "master" else base.parent) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder)
    return folder
