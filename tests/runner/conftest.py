from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridge.runner import Engine, load

from .toy_model import Toy, write_toy


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="session")
def toy_artifact(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "artifact", toy)


@pytest.fixture
def open_engine(toy_artifact: Path) -> Callable[..., Engine]:
    def open_it(path: Path = toy_artifact, **options: object) -> Engine:
        return load(path, **{"threads": 1, "use_native": False, **options})  # type: ignore[arg-type]

    return open_it


@pytest.fixture
def engine(open_engine: Callable[..., Engine]) -> Engine:
    return open_engine()
