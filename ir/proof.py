"""Prove that a region computes what a fused op is defined to compute.

A pass says which nodes hold the op's operands. The proof runs the region, exactly as it stands in the graph, beside the
op's reference on small batches made to tell wrong variants apart (ragged, empty and padded sequences, block edges, ties,
large values), and compares. So it does not matter how the maths is written, and nothing in it goes unread: a constant, an
attribute or a mask that differs shows in some trial, and that trial's rule is the reason of the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir.effects import is_random, op_name
from hybridge.ir.evaluate import NotEvaluable, Sizes, run
from hybridge.ir.pass_base import PassContext, Refusal
from hybridge.ir.region import cone
from hybridge.ir.signature import METADATA, is_integer, is_weight
from hybridge.ir.text import region_text, text_hash

#: Ops whose result is not determined by their arguments' values: a trial proves nothing about them.
UNDETERMINED = {
    "aten::topk": "aten::topk promises no order between equal scores; use a stable descending sort",
    "aten::kthvalue": "aten::kthvalue promises no order between equal scores",
    "aten::empty": "aten::empty has no defined values",
    "aten::empty_like": "aten::empty_like has no defined values",
    "aten::new_empty": "aten::new_empty has no defined values",
}


@dataclass(frozen=True)
class Trial:
    """One run of a region beside a definition.

    Args:
        rule: what the trial is about: the rule that a wrong region breaks.
        given: values of the region's inputs, one a node; the run may write to them.
        expected: of each output, from the definition.
        rows: [rows] bool, which rows of the outputs count (padding tokens' rows are read by nobody).
        states: node -> its value after the run, for nodes that the region writes to.
    """

    rule: str
    given: Mapping[Node, Tensor]
    expected: Sequence[Tensor]
    rows: Tensor | None = None
    states: Mapping[Node, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What the trials showed: `passed` of them in a row, and the first that failed (empty rule: none)."""

    passed: int
    rule: str = ""
    reason: str = ""

    @property
    def holds(self) -> bool:
        return not self.rule

    def refusal(self, anchor: Node, op: str) -> Refusal:
        return Refusal(
            anchor.name, self.rule, self.reason, f"write it as {op} is defined, or leave it unfused"
        )


def prove(
    context: PassContext,
    name: str,
    outputs: Sequence[Node],
    inputs: Iterable[Node],
    trials: Callable[[], Iterator[tuple[Trial, Sizes]]],
    view: Callable[[int, Tensor], Tensor] = lambda _, value: value,
    tolerance: float = 0.0,
    writes: Sequence[Node] = (),
) -> Verdict:
    """Run the trials, or recall the verdict of an equal region.

    Args:
        context: of the pass.
        name: what the verdict is about: pass, op, attributes, roles of the inputs; part of what it is recalled by.
        outputs: the region's outputs.
        inputs: nodes that the trials give values to; the region is what lies between.
        trials: makes the trials; called only if there is no verdict yet.
        view: turns (output index, computed value) into the definition's axes.
        tolerance: largest accepted difference relative to the largest expected value; 0 asks for equality.
        writes: nodes with effects that belong to the region.
    """
    ordered = list(inputs)
    stop = set(ordered)
    nodes = cone([*outputs, *writes], stop, context.effects)
    stray = _stray(nodes)
    if stray is not None:
        return stray
    labels = {node: f"role{place}" for place, node in enumerate(ordered)}
    ends = ", ".join(str(nodes.index(node)) for node in outputs)
    key = text_hash(f"{name}\n{ends}\n{region_text(nodes, labels)}")
    if key not in context.proofs:
        context.proofs[key] = _run_trials(nodes, outputs, trials(), view, tolerance)
    verdict: Verdict = context.proofs[key]
    return verdict


def _stray(nodes: Iterable[Node]) -> Verdict | None:
    """The first node that a proof cannot run or must not trust."""
    for node in nodes:
        if node.op != "call_function":
            kind = "weight" if is_weight(node) else "input"
            return Verdict(0, "foreign operand", f"it also depends on the {kind} {node.name}")
        reason = UNDETERMINED.get(op_name(node))
        if reason is not None:
            return Verdict(0, "undetermined op", f"{node.name}: {reason}")
        if op_name(node) == "aten::sort" and not node.kwargs.get("stable") and _sorts_scores(node):
            return Verdict(
                0,
                "unstable sort",
                f"{node.name} sorts without stable=True: equal scores have no defined order",
            )
        if is_random(node):
            return Verdict(0, "random op", f"{node.name} draws random numbers")
    return None


def _sorts_scores(node: Node) -> bool:
    """Whether the order of equal elements can show: their indices are used."""
    return any(user.args[1] == 1 and user.users for user in node.users)


def _run_trials(
    nodes: Sequence[Node],
    outputs: Sequence[Node],
    trials: Iterator[tuple[Trial, Sizes]],
    view: Callable[[int, Tensor], Tensor],
    tolerance: float,
) -> Verdict:
    passed = 0
    for trial, sizes in trials:
        try:
            values = run(nodes, trial.given, sizes)
        except NotEvaluable as error:
            return Verdict(passed, trial.rule, str(error))
        reason = _difference(trial, outputs, values, view, tolerance)
        if reason:
            return Verdict(passed, trial.rule, reason)
        passed += 1
    if passed == 0:
        return Verdict(0, "no trial fits", "no small batch fits the graph's fixed sizes")
    return Verdict(passed)


def _difference(
    trial: Trial,
    outputs: Sequence[Node],
    values: Mapping[Node, Tensor],
    view: Callable[[int, Tensor], Tensor],
    tolerance: float,
) -> str:
    for place, (node, expected) in enumerate(zip(outputs, trial.expected, strict=True)):
        actual = view(place, values[node])
        if trial.rows is not None:
            actual, expected = actual[trial.rows], expected[trial.rows]
        reason = compare(node.name, actual, expected, tolerance)
        if reason:
            return reason
    for node, expected in trial.states.items():
        reason = compare(f"{node.name} afterwards", values[node], expected, tolerance)
        if reason:
            return reason
    return ""


def compare(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> str:
    """Say where two tensors differ, or nothing."""
    if actual.shape != expected.shape:
        return f"{name} has shape {list(actual.shape)}, the definition {list(expected.shape)}"
    if actual.numel() == 0:
        return ""
    left, right = actual.to(torch.float64), expected.to(torch.float64)
    limit = tolerance * max(1.0, float(right.abs().max()))
    wrong = ~((left - right).abs() <= limit)
    if not bool(wrong.any()):
        return ""
    place = wrong.nonzero()[0].tolist()
    index = tuple(place)
    return f"at {place} {name} gives {left[index]:.6g}, the definition {right[index]:.6g}"


class MetadataOnly:
    """Tells nodes that depend on nothing but the batch's integer inputs: masks, lengths, positions.

    Args:
        context: of the pass; call again after a rewrite, new nodes are looked at when asked for.
    """

    def __init__(self, context: PassContext) -> None:
        self._effects = context.effects
        self._known: dict[Node, bool] = {}

    def __call__(self, node: Node) -> bool:
        """Whether the node's value is decided by the metadata inputs."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in self._known:
                pending.pop()
                continue
            needed = [*current.all_input_nodes, *self._writers(current)]
            unknown = [each for each in needed if each not in self._known and each is not current]
            if unknown and current.op == "call_function":
                self._known_guard(current, pending, unknown)
                continue
            self._known[current] = self._decide(current, needed)
            pending.pop()
        return self._known[node]

    def _known_guard(self, current: Node, pending: list[Node], unknown: list[Node]) -> None:
        # A tensor and the in-place write to it need each other: decide the one met again from what is known.
        if all(each in pending for each in unknown):
            self._known[current] = all(
                self._known.get(each, True) for each in current.all_input_nodes
            )
            return
        pending.extend(each for each in unknown if each not in pending)

    def _writers(self, node: Node) -> list[Node]:
        if any(root.op != "call_function" for root in self._effects.roots(node)):
            return []
        return [write for write in self._effects.writes_to(node) if write is not node]

    def _decide(self, node: Node, needed: list[Node]) -> bool:
        if node.op == "placeholder":
            return str(node.target) in METADATA and is_integer(node)
        if node.op != "call_function" or is_random(node):
            return False
        return all(self._known.get(each, True) for each in needed)
