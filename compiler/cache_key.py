"""All that decides an artifact, as the compile cache's key: a change of any of it is another key.

What compiles is hashed as it lies here, file by file, so that a change of a pass, of an op's schema or reference, or of
a lowering is a miss without anyone having to raise a version.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from hybridge import __version__
from hybridge.artifacts.canonical import digest_file
from hybridge.artifacts.errors import ArtifactError
from hybridge.compiler.build import CompileOptions
from hybridge.compiler.describe import TOOLS
from hybridge.compiler.source import Source
from hybridge.compiler.targets.ascend.options import AscendOptions
from hybridge.kernels import library_path

_ROOMS = ("artifacts", "compiler", "ir", "models", "ops", "passes")


def cache_fields(
    model: Source, options: CompileOptions, on_ascend: AscendOptions | None, *, golden: bool
) -> dict[str, Any]:
    """The fields of an artifact's key, plain JSON.

    Args:
        model: config, weights and tokenizer; every file is hashed.
        options, on_ascend: what the caller chose.
        golden: whether golden values will be computed, which depends on the machine's memory as well.
    """
    return {
        "hybridge": __version__,
        "sources": _sources(),
        "kernels": _kernels(),
        "tools": {name: _version(name) for name in (*TOOLS, "torch-npu")},
        "python": platform.python_version(),
        "config": dict(model.config.raw),
        "weights": _weights(model, options),
        "tokenizer": "" if model.tokenizer is None else digest_file(model.tokenizer),
        "options": asdict(options),
        "ascend": {} if on_ascend is None else asdict(on_ascend),
        "golden": golden,
    }


def _weights(model: Source, options: CompileOptions) -> dict[str, str]:
    """File -> sha256; an artifact that refers to the checkpoint depends on where that lies, too."""
    if model.checkpoint is None or options.weights == "none":
        return {}
    folder = model.checkpoint.folder
    files = sorted({region.file for region in model.checkpoint.regions.values()})
    found = {file.relative_to(folder).as_posix(): digest_file(file) for file in files}
    if options.weights == "reference":
        found["folder"] = str(folder.absolute())
    return found


@cache
def _sources() -> dict[str, str]:
    """Source file of what compiles -> sha256."""
    found: dict[str, str] = {}
    for room in _ROOMS:
        (root,) = importlib.import_module(f"hybridge.{room}").__path__
        for file in sorted(Path(root).rglob("*.py")):
            found[f"{room}/{file.relative_to(root).as_posix()}"] = digest_file(file)
    return found


def _kernels() -> str:
    """The kernels' sha256, or nothing: an artifact's graphs call them by a contract that both sides have to keep."""
    try:
        return digest_file(library_path())
    except ArtifactError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
