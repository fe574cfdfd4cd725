"""The compiler: trace, pipeline, targets. `compile_model` is the way in; it needs the extra `compile`."""

from hybridge.compiler.compile import compile_model

__all__ = ["compile_model"]
