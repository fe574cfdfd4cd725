"""Mark runs of operators that one super kernel can run: one launch instead of one an operator.

    gate mm -> top-k -> routing -> gmm -> situ -> gmm -> finalize -> norm -> up mm
    `------------------------- super kernel "sk_12" ------------------------------'

A run is what the main stream issues between two events: a super kernel is one task of its stream,
so nothing can wait in the middle of it. An operator that cannot be inside (no AI Core kernel, a
collective, dynamic shapes, core limits of its own, or on the list of exclusions) ends the run; the
real compiler would split there in silence. Runs that would save less than they are worth are left alone.

Works on a lowered graph after `assign_streams`; marks nodes with `meta["super_kernel"]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from hybridge.ir.cost import Machine, cost_of, engine_of
from hybridge.ir.effects import is_view, op_name
from hybridge.ir.pass_base import Match, PassResult, Refusal
from hybridge.ir.schedule import MAIN_STREAM, Engine
from hybridge.ir.schedule_ops import CORES, RECORD, SUPER_KERNEL, WAIT, stream_of
from hybridge.passes.check_schedule import MAX_SCOPES

# Fewer kernels than this are not worth a scope.
LEAST_KERNELS = 4
# A scope must save this share of its own time, or it only makes the graph harder to profile.
LEAST_SHARE = 0.02

# Names of the reject reasons in the logs of the real super-kernel compiler (sk_meta).
OP_UNSUPPORT = "OP_UNSUPPORT"
DYNAMIC_TASK_UNSUPPORT = "DYNAMIC_TASK_UNSUPPORT"
UNFUSIBLE_NODE = "UNFUSIBLE_NODE"
RESOURCE_INSUFFICIENT = "RESOURCE_INSUFFICIENT"
DEADLOCK_DETECTED = "DEADLOCK_DETECTED"


@dataclass(frozen=True)
class SuperKernelPolicy:
    """What the target knows of its super-kernel compiler.

    Attributes:
        excluded: operators that stay outside, with why.
        static_shapes: whether the graph has only static shapes; without, no scope is legal.
    """

    excluded: tuple[tuple[str, str], ...] = ()
    static_shapes: bool = True


@dataclass(frozen=True)
class Scope:
    """One super kernel.

    Attributes:
        name: of the scope. nodes: its kernels. saved: seconds of launches that it saves.
    """

    name: str
    nodes: tuple[str, ...]
    saved: float


class MergeSuperKernels:
    """The pass: scopes over runs of fusible kernels, refusals with the real compiler's names."""

    name: ClassVar[str] = "merge_super_kernels"

    def run(
        self, gm: GraphModule, machine: Machine, policy: SuperKernelPolicy
    ) -> tuple[PassResult, tuple[Scope, ...]]:
        """Mark scopes in place.

        Args:
            gm: a lowered graph with streams and metadata.
            machine: what a launch costs.
            policy: see `SuperKernelPolicy`.
        """
        start = time.perf_counter()
        scopes: list[Scope] = []
        refusals: list[Refusal] = []
        for run in _runs(gm, policy, refusals):
            kernels = [node for node in run if not is_view(node)]
            reason = _not_worth(kernels, machine)
            if reason is None and len(scopes) == MAX_SCOPES:
                reason = (RESOURCE_INSUFFICIENT, f"{MAX_SCOPES} scopes are in use")
            if reason is not None:
                if len(kernels) > 1:
                    refusals.append(Refusal(kernels[0].name, *reason, "none needed"))
                continue
            scope = Scope(
                f"sk_{len(scopes)}",
                tuple(node.name for node in kernels),
                (len(kernels) - 1) * machine.launch,
            )
            _mark(run, kernels, scope.name)
            scopes.append(scope)
        matches = tuple(Match(scope.nodes[0], scope.nodes) for scope in scopes)
        count = len(gm.graph.nodes)
        took = time.perf_counter() - start
        result = PassResult(
            self.name, matches, _each_once(refusals), bool(scopes), count, count, 0, took
        )
        return result, tuple(scopes)


def _each_once(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """One refusal an operator and reason: a list of every layer's says nothing more."""
    seen: dict[tuple[str, str], Refusal] = {}
    for refusal in refusals:
        seen.setdefault((refusal.rule, refusal.reason), refusal)
    return tuple(seen.values())


def _runs(
    gm: GraphModule, policy: SuperKernelPolicy, refusals: list[Refusal]
) -> Iterator[list[Node]]:
    """Runs of main-stream nodes with no event and no unfusible node between."""
    run: list[Node] = []
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in (RECORD, WAIT):
            cut = stream_of(node) == MAIN_STREAM
        elif stream_of(node) != MAIN_STREAM:
            # Issued between two of the run's nodes; the scope is in the order of issue.
            cut = True
        else:
            refusal = _unfusible(node, policy)
            cut = refusal is not None
            if refusal is not None:
                refusals.append(refusal)
            else:
                run.append(node)
        if cut:
            yield run
            run = []
    yield run


def _unfusible(node: Node, policy: SuperKernelPolicy) -> Refusal | None:
    name = op_name(node).split("::")[-1]
    engine = engine_of(node)
    if engine is Engine.COMMUNICATION:
        return Refusal(node.name, OP_UNSUPPORT, f"{name} is a collective", "keep it outside")
    for excluded, why in policy.excluded:
        if name == excluded:
            return Refusal(node.name, UNFUSIBLE_NODE, f"{name}: {why}", "keep it outside")
    if CORES in node.meta:
        return Refusal(
            node.name,
            DEADLOCK_DETECTED,
            f"{name} leaves cores to another stream; inside, it would have those of the whole scope",
            "keep it outside",
        )
    if not policy.static_shapes or _is_dynamic(node):
        return Refusal(
            node.name,
            DYNAMIC_TASK_UNSUPPORT,
            f"{name} has dynamic shapes",
            "compile a bucket of static sizes",
        )
    return None


def _is_dynamic(node: Node) -> bool:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _not_worth(kernels: Sequence[Node], machine: Machine) -> tuple[str, str] | None:
    if len(kernels) < LEAST_KERNELS:
        return UNFUSIBLE_NODE, f"a run of fewer than {LEAST_KERNELS} kernels"
    total = sum(machine.seconds(cost_of(node)) for node in kernels)
    saved = (len(kernels) - 1) * machine.launch
    if saved < LEAST_SHARE * total:
        return UNFUSIBLE_NODE, f"saves less than {LEAST_SHARE:.0%} of its time"
    return None


def _mark(run: Sequence[Node], kernels: Sequence[Node], scope: str) -> None:
    """Everything from the first kernel to the last, views between them included."""
    first, last = run.index(kernels[0]), run.index(kernels[-1])
    for node in run[first : last + 1]:
        node.meta[SUPER_KERNEL] = scope
