"""What is compiled: a checkpoint folder, or only a config where no weights are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridge.artifacts.errors import UsageError
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import ModelConfig, load_config
from hybridge.models.presets import preset, preset_names


@dataclass(frozen=True)
class Source:
    """A model to compile.

    Args:
        config: the model.
        checkpoint: its weights; None compiles graphs only.
        tokenizer: the checkpoint's tokenizer.json, where there is one.
    """

    config: ModelConfig
    checkpoint: Checkpoint | None = None
    tokenizer: Path | None = None


def open_source(source: str | Path, *, with_weights: bool) -> Source:
    """Find out what `source` names, and check a checkpoint's tensors against its config.

    Args:
        source: a checkpoint folder; without weights also a preset's name, a folder with only a
            config.json, or a config.json.
        with_weights: whether the weights will be read.

    Raises:
        UsageError: nothing of that name, or a config where weights are wanted.
        CheckpointError: the config or the checkpoint is not right.
    """
    path = Path(source)
    if path.is_dir():
        return _from_folder(path, with_weights)
    if with_weights:
        raise UsageError(
            f"{source}: is no checkpoint folder",
            "give a folder with config.json and safetensors, or --weights none for graphs only",
        )
    if path.is_file():
        return Source(load_config(path))
    if str(source) in preset_names():
        return Source(preset(str(source)))
    raise UsageError(
        f"{source}: is no checkpoint folder, config.json or preset",
        f"presets are {', '.join(preset_names())}",
    )


def _from_folder(folder: Path, with_weights: bool) -> Source:
    config = load_config(folder)
    tokenizer = folder / "tokenizer.json"
    found = tokenizer if tokenizer.is_file() else None
    if not with_weights:
        return Source(config, None, found)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(config)
    return Source(config, checkpoint, found)
