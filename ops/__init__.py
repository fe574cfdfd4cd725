"""The vocabulary of fused ops: importing this package registers every op with torch.

`vocabulary` maps a name to its `FusedOp`: schema, reference (the definition), fake kernel, effects and
constraints. `find` gives the op behind a torch overload.
"""

from hybridge.ops import (
    attention,
    attn_res,
    elementwise,
    kda,
    lightning_indexer,
    mla_absorb,
    moe,
    packed,
    paged_write,
)
from hybridge.ops.registry import Constraint, FusedOp, find, vocabulary

__all__ = ["Constraint", "FusedOp", "find", "vocabulary"]

# Named so that a reader sees which modules fill the vocabulary.
MODULES = (
    paged_write,
    lightning_indexer,
    attention,
    mla_absorb,
    kda,
    attn_res,
    moe,
    elementwise,
    packed,
)
