"""Which operators a graph in an artifact may call: what is written, and what is loaded again.

A graph is loaded from data (`graphs/<graph>_npu.json`), never by running the Python source beside it.
Loading looks an operator up only if it is listed here: nothing that reads or writes files, prints,
or has other effects than on its tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from hybridge.compiler.targets.ascend.operators import (
    FAKES,
    OWN_NAMESPACE,
    define_operators,
)
from hybridge.ir.schedule_ops import RECORD, WAIT

# Of aten: what has an overload in the set that torch tags as core, and these, which compose to it.
_MORE_ATEN = frozenset(
    {
        *("t", "transpose", "split", "reshape", "flatten", "narrow", "detach", "stack"),
        *("_unsafe_view", "new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones"),
        *("zeros_like", "ones_like", "triu", "tril", "masked_fill", "floor_divide"),
        *("silu", "softmax", "softplus", "square", "linear", "matmul"),
    }
)
_EVENTS = {"hybridge_schedule::record_event": RECORD, "hybridge_schedule::wait_event": WAIT}
GETITEM = "getitem"
# Of sizes that are open, as torch traces them.
ARITHMETIC = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def loadable(name: str, overload: str) -> Callable[..., Any] | None:
    """The operator of a qualified name (`aten::add`) and overload, or None if it is not allowed."""
    if name == GETITEM:
        return operator.getitem
    if name in ARITHMETIC:
        return ARITHMETIC[name]
    if name in _EVENTS:
        return _EVENTS[name]
    namespace, _, short = name.partition("::")
    known = name in FAKES and namespace in ("npu", OWN_NAMESPACE)
    if not known and (namespace != "aten" or not short.isidentifier()):
        return None
    define_operators()
    packet = getattr(getattr(torch.ops, namespace), short, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or overload not in packet.overloads():
        return None
    found = getattr(packet, overload)
    if known:
        return found  # type: ignore[no-any-return]
    core = any(torch.Tag.core in getattr(packet, each).tags for each in packet.overloads())
    return found if (core or short in _MORE_ATEN) and not found._schema.is_mutable else None
