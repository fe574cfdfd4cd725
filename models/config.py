"""The configuration of a Kimi Linear, K3 or K3.1 model, read from its published config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hybridge.artifacts.errors import CheckpointError
from hybridge.models.config_reader import read_config
from hybridge.models.config_section import kind_of
from hybridge.models.model_config import (
    MXFP4_GROUP,
    Activation,
    DsaConfig,
    Family,
    KdaConfig,
    LayerKind,
    ModelConfig,
    MoeConfig,
    Mxfp4Config,
    ResidualSite,
    WeightType,
)

__all__ = [
    "CONFIG_FILE",
    "MXFP4_GROUP",
    "Activation",
    "DsaConfig",
    "Family",
    "KdaConfig",
    "LayerKind",
    "ModelConfig",
    "MoeConfig",
    "Mxfp4Config",
    "ResidualSite",
    "WeightType",
    "config_from_dict",
    "load_config",
]

CONFIG_FILE: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 16 << 20
_JSON_REMEDY: Final = "replace it with the model's published config.json"


def load_config(path: str | Path) -> ModelConfig:
    """Read a model's configuration.

    Args:
        path: a checkpoint folder, or a config.json itself.

    Raises:
        CheckpointError: the file is missing or no JSON, or a field is missing, of a wrong type, not
            supported, or contradicts another one.
    """
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG_FILE
    return config_from_dict(_read_json(file), source=str(file))


def config_from_dict(raw: Mapping[str, object], source: str = CONFIG_FILE) -> ModelConfig:
    """Read a configuration from parsed JSON: top-level fields, or nested in `text_config`.

    Args:
        raw: the parsed config.json.
        source: the file's name, for messages.

    Raises:
        CheckpointError: as `load_config`.
    """
    return read_config(raw, source)


def _read_json(file: Path) -> Mapping[str, object]:
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{file}: larger than 16 MiB", "is this the model's config.json?")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror or error})",
            "give a checkpoint folder that holds config.json, or the file itself",
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{file}: is not UTF-8 text ({error.reason})", _JSON_REMEDY
        ) from error
    try:
        values = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error})", _JSON_REMEDY) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: holds {kind_of(values)}, not an object", _JSON_REMEDY)
    return values


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field '{twice}' is given twice")
    return values


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")
