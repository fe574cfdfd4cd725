"""Prove that a region computes what a fused op is defined to compute.

A pass says which nodes hold the op's operands. The proof runs the region, exactly as it stands in the graph,
beside the op's reference on small batches made to tell wrong variants apart (ragged, empty and padded
sequences, block edges, ties, large values), and compares. So it does not matter how the maths is written, and
nothing in it goes unread: a constant, an attribute or a mask that differs shows in some trial, and that
trial's rule is the reason of the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir.effects import is_random, op_name, written_arguments
from hybridge.ir.evaluate import NotEvaluable, Sizes, run
from hybridge.ir.pass_base import PassContext, Refusal
from hybridge.ir.region import cone, is_size
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


_SORTS = ("aten::sort", "aten::argsort")


@dataclass(frozen=True)
class Trial:
    """One run of a region beside a definition.

    Args:
        rule: what the trial is about: the rule that a wrong region breaks.
        given: values of the region's inputs, one a node; the run may write to them.
        expected: of each output, from the definition.
        rows: [rows] bool, which rows of the outputs count (padding tokens' rows are read by nobody).
        states: node -> its value after the run, for nodes that the region writes to.
        suspects: likely mistakes, as (the rule each breaks, what it gives); asked only when the trial fails, so
            that the refusal names the mistake.
    """

    rule: str
    given: Mapping[Node, Tensor]
    expected: Sequence[Tensor]
    rows: Tensor | None = None
    states: Mapping[Node, Tensor] = field(default_factory=dict)
    suspects: Callable[[], Iterator[tuple[str, Sequence[Tensor]]]] = lambda: iter(())


@dataclass(frozen=True)
class Verdict:
    """What the trials showed.

    Args:
        passed: trials in a row that held; -1 if the region could not be tried at all.
        rule: of the first that failed; empty if none did.
        reason: what it showed.
        named: whether a suspect gave just what the region gives.
    """

    passed: int
    rule: str = ""
    reason: str = ""
    named: bool = False

    @property
    def holds(self) -> bool:
        return not self.rule

    @property
    def rank(self) -> tuple[bool, int, bool]:
        """Orders verdicts about one site: proved, then the nearest miss, then the best explained."""
        return self.holds, self.passed, self.named

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
        try:
            context.proofs[key] = _run_trials(nodes, outputs, trials(), view, tolerance)
        except NotEvaluable as error:
            context.proofs[key] = Verdict(0, "sizes of the batch", str(error))
    verdict: Verdict = context.proofs[key]
    return verdict


def _stray(nodes: Iterable[Node]) -> Verdict | None:
    """The first node that a proof cannot run or must not trust."""
    for node in nodes:
        if node.op != "call_function":
            kind = "weight" if is_weight(node) else "input"
            return Verdict(-1, "foreign operand", f"it also depends on the {kind} {node.name}")
        reason = UNDETERMINED.get(op_name(node))
        if reason is not None:
            return Verdict(-1, "undetermined op", f"{node.name}: {reason}")
        if op_name(node) in _SORTS and not node.kwargs.get("stable") and _sorts_scores(node):
            return Verdict(
                0,
                "unstable sort",
                f"{node.name} sorts without stable=True: equal scores have no defined order",
            )
        if is_random(node):
            return Verdict(-1, "random op", f"{node.name} draws random numbers")
    return None


def _sorts_scores(node: Node) -> bool:
    """Whether the order of equal elements can show: the indices are used."""
    if op_name(node) == "aten::argsort":
        return True
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
            rule = _broken_rule(trial, outputs, values, view, tolerance)
            return Verdict(passed, rule, reason, named=rule != trial.rule)
        passed += 1
    if passed == 0:
        return Verdict(0, "no trial fits", "no small batch fits the graph's fixed sizes")
    return Verdict(passed)


def _broken_rule(
    trial: Trial,
    outputs: Sequence[Node],
    values: Mapping[Node, Tensor],
    view: Callable[[int, Tensor], Tensor],
    tolerance: float,
) -> str:
    """The rule of the suspect that gives just what the region gives, else the trial's own."""
    for rule, given in trial.suspects():
        guess = replace(trial, expected=given, states={})
        if not _difference(guess, outputs, values, view, tolerance):
            return rule
    return trial.rule


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
        context: of the pass. Nodes made later are taken to depend on more.
    """

    def __init__(self, context: PassContext) -> None:
        self._effects = context.effects
        self._decided: set[Node] = set()
        # Tensors that something else was written into, from that write on.
        self._tainted: set[Node] = set()
        for node in context.graph.nodes:
            self._visit(node)

    def __call__(self, node: Node) -> bool:
        """Whether the node's value is decided by the metadata inputs (and sizes)."""
        return node in self._decided

    def _visit(self, node: Node) -> None:
        inputs_decided = all(self._is_clean(each) for each in node.all_input_nodes)
        if written_arguments(node) and not inputs_decided:
            self._tainted |= self._effects.written_inputs(node)
        if is_size(node) or self._decides(node, inputs_decided):
            self._decided.add(node)

    def _is_clean(self, node: Node) -> bool:
        return node in self._decided and not self._effects.roots(node) & self._tainted

    def _decides(self, node: Node, inputs_decided: bool) -> bool:
        if node.op == "placeholder":
            return str(node.target) in METADATA and is_integer(node)
        return node.op == "call_function" and inputs_decided and not is_random(node)
