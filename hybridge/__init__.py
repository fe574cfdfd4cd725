"""hybridge: an ahead-of-time graph compiler for hybrid LLMs (KDA + DSA + AttnRes + latent MoE).

Public names, imported on first use so that a deployment without torch can use the runner:

* ``compile_model``: checkpoint in, artifact out (needs the extra ``compile``).
* ``load``: open an artifact and return the engine that runs it (numpy and onnxruntime only).
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridge.compiler import compile_model
    from hybridge.runner import load

__version__ = "0.1.0"
__all__ = ["__version__", "compile_model", "load"]

# With torch-npu installed, a plain `import torch` loads it and fails where there is no CANN. This
# runs before any room can import torch; a user who has CANN and wants it says so with "1".
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

_ROOM_OF = {"compile_model": "hybridge.compiler", "load": "hybridge.runner"}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'hybridge' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOM_OF[name]), name)
