"""What is said of a model that the operators do not take: every reason, once, with where and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridge.artifacts.errors import CompileError
from hybridge.compiler.targets.ascend.constraints import Violation


class DoesNotFitError(CompileError):
    """The model breaks constraints of the operators that it would become.

    Args:
        soc: the target.
        violations: graph (or phase) -> its broken constraints.
    """

    def __init__(self, soc: str, violations: Mapping[str, Sequence[Violation]]) -> None:
        self.soc, self.violations = soc, violations
        reasons = _reasons(violations)
        super().__init__(
            f"lowering: the model does not fit the operators of {soc}, for {len(reasons)} "
            f"reason{'s' * (len(reasons) > 1)}:\n" + "\n".join(reasons),
            "each reason says what would fit",
        )


def _reasons(violations: Mapping[str, Sequence[Violation]]) -> list[str]:
    """One a broken rule and value, in the order found; all its nodes together."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for graph, broken in violations.items():
        for each in broken:
            rule = each.rule
            head = f"{rule.operator}: {rule.fact} is {each.found}, must be {rule.allowed}"
            tail = f"      {rule.remedy}\n      source: {rule.source}"
            found.setdefault((head, tail), {}).setdefault(graph, []).append(each.node)
    return [
        f"  {head}\n      at {'; '.join(_where(graph, nodes) for graph, nodes in places.items())}"
        f"\n{tail}"
        for (head, tail), places in found.items()
    ]


def _where(graph: str, nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"{graph}: {nodes[0]}{more}"
