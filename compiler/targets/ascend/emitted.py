"""One phase at one bucket, with all that was decided about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridge.compiler.targets.ascend.convert import GeGraph
from hybridge.compiler.targets.ascend.lowering import Lowered
from hybridge.ir.pass_base import PassResult
from hybridge.ir.schedule import Schedule
from hybridge.passes.assign_nz_layout import Layout
from hybridge.passes.assign_streams import Choice
from hybridge.passes.check_schedule import Proof
from hybridge.passes.merge_super_kernels import Scope


@dataclass(frozen=True)
class EmittedGraph:
    """One graph.

    Attributes:
        name: "decode", or "decode_b8" where a phase has several.
        lowered: the graph of npu operators. layouts: of its weights, in their order.
        choices: of streams. scopes: super kernels. schedule, proof: of the order.
        graph: converted; None without torchair.
        results: of the target's own passes. seconds: step -> time.
    """

    name: str
    lowered: Lowered
    layouts: tuple[Layout, ...]
    choices: tuple[Choice, ...]
    scopes: tuple[Scope, ...]
    schedule: Schedule
    proof: Proof
    graph: GeGraph | None
    results: tuple[PassResult, ...]
    seconds: Mapping[str, float]
