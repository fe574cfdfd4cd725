"""hybridge.kernels: where the native CPU kernels are, and how a session gets them.

The kernels are onnxruntime custom operators of domain ``hybridge`` in one shared library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hybridge.artifacts.errors import ArtifactError

if TYPE_CHECKING:
    import onnxruntime

LIBRARY_NAME = "libhybridge_kernels.so"
LIBRARY_VARIABLE = "HYBRIDGE_KERNELS_LIBRARY"


def library_path() -> Path:
    """The kernel library: ``HYBRIDGE_KERNELS_LIBRARY`` if set, else the one installed.

    Raises:
        ArtifactError: the variable names no file, or none is installed.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return _existing(Path(named), f"{LIBRARY_VARIABLE}={named} is no file")
    # An editable install has two folders: the sources, and the one the library was built into.
    candidates = [Path(folder) / LIBRARY_NAME for folder in __path__]
    installed = next((path for path in candidates if path.is_file()), candidates[0])
    return _existing(installed, f"the kernel library {LIBRARY_NAME} is not installed")


def _existing(path: Path, otherwise: str) -> Path:
    if not path.is_file():
        raise ArtifactError(
            otherwise,
            f"install the hybridge wheel, or build kernels/ with cmake and set {LIBRARY_VARIABLE}",
        )
    return path


def register(session_options: onnxruntime.SessionOptions) -> None:
    """Makes the operators known to sessions created with ``session_options``.

    Raises:
        ArtifactError: the library is missing or onnxruntime cannot load it.
    """
    path = library_path()
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime raises its own kinds, by version
        raise ArtifactError(
            f"onnxruntime cannot load the kernel library {path}: {error}",
            "rebuild it for this machine (cmake -S kernels) or reinstall the wheel",
        ) from error
