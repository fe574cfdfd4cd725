"""What each npu operator computes, in plain torch on the CPU: a table operator -> function.

Written from the operators' documentation (the source of each is in its docstring), to run a lowered
graph without a device. They check the wiring: argument order, prefix sums against lengths, layouts,
null slots. They say nothing about a device's rounding or speed. Names and argument order are those
of the operators' schemas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridge.compiler.targets.ascend.npu_reference import (
    attention,
    attn_res,
    basic,
    expert_parallel,
    kda,
    mla_prolog,
    moe,
)

REFERENCES: dict[str, Callable[..., Any]] = {
    **basic.REFERENCES,
    **attention.REFERENCES,
    **kda.REFERENCES,
    **mla_prolog.REFERENCES,
    **attn_res.REFERENCES,
    **moe.REFERENCES,
    **expert_parallel.REFERENCES,
}
