"""The validity table: what every graph must be, before the first pass and after each one, and what targets need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from hybridge.artifacts.errors import CompileError
from hybridge.ir.effects import Effects, is_assertion, op_name, schema_of, written_arguments
from hybridge.ir.signature import is_weight, value_of

#: Namespaces whose ops have schemas that passes can trust, fake kernels and a meaning in every target.
NAMESPACES = ("aten", "hybridge", "prims")


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Args:
        name: in messages. why: what goes wrong otherwise.
        violations: says what breaks the rule, one text a violation.
        remedy: what the author of a model can do; empty where only a pass can break the rule.
    """

    name: str
    why: str
    violations: Callable[[GraphModule], Iterator[str]]
    remedy: str = ""


def _metadata(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        silent = is_assertion(node) or node.op in ("output", "get_attr")
        if not silent and "val" not in node.meta:
            yield f"{node.name} has no recorded shape and dtype"


def _known_ops(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield f"{node.name} is a {node.op}"
        schema = schema_of(node)
        if schema is not None and schema.name.split("::")[0] not in NAMESPACES:
            yield f"{node.name} calls {schema.name}"


def _order(gm: GraphModule) -> Iterator[str]:
    seen: set[Node] = set()
    for node in gm.graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                yield f"{node.name} uses {argument.name} before it is defined"
        seen.add(node)


def _dangling(gm: GraphModule) -> Iterator[str]:
    inside = set(gm.graph.nodes)
    for node in gm.graph.nodes:
        for user in node.users:
            if user not in inside:
                yield f"{node.name} is used by {user.name}, which is not in the graph"


def _writes(gm: GraphModule) -> dict[Node, list[tuple[Node, Node]]]:
    """Input of the graph -> (vocabulary op, argument through which it writes) of each write, in order."""
    effects = Effects(gm.graph)
    found: dict[Node, list[tuple[Node, Node]]] = {}
    for node in gm.graph.nodes:
        for argument in written_arguments(node) if op_name(node).startswith("hybridge::") else ():
            for owner in effects.roots(argument):
                if owner.op == "placeholder":
                    found.setdefault(owner, []).append((node, argument))
    return found


def _one_writer(gm: GraphModule) -> Iterator[str]:
    for owner, writes in _writes(gm).items():
        if len(writes) > 1 and any(argument is owner for _, argument in writes):
            yield f"{owner.name} is written by {len(writes)} vocabulary ops"


def _whole_writes(gm: GraphModule) -> Iterator[str]:
    for owner, writes in _writes(gm).items():
        if all(argument is owner for _, argument in writes):
            continue
        names = ", ".join(node.name for node, _ in writes)
        yield f"{owner.name} is written in parts, by {names}"


def _weights_constant(gm: GraphModule) -> Iterator[str]:
    effects = Effects(gm.graph)
    for node in gm.graph.nodes:
        for argument in written_arguments(node):
            for owner in effects.roots(argument):
                if is_weight(owner):
                    yield f"{node.name} writes to the weight {owner.name}"


def _unique_names(gm: GraphModule) -> Iterator[str]:
    counts = Counter(node.target for node in gm.graph.nodes if node.op == "placeholder")
    for name, count in counts.items():
        if count > 1:
            yield f"{count} inputs are called {name}"


def _outputs(gm: GraphModule) -> Iterator[str]:
    outputs = [node for node in gm.graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        yield f"the graph has {len(outputs)} output nodes"


def _dtypes(gm: GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.Tensor) and value.dtype.is_complex:
            yield f"{node.name} is complex"


TABLE: tuple[Rule, ...] = (
    Rule("defined before use", "the order of nodes is the order of execution", _order),
    Rule("no dangling users", "an erased node would still be read", _dangling),
    Rule("shapes recorded", "later passes and targets size buffers by them", _metadata),
    Rule("known ops", "a target can only lower what has a schema", _known_ops),
    # Parts of a cache may be written one by one: a fusion may make one write of them.
    Rule(
        "one writer a cache",
        "two writes to one cache have no safe order on streams",
        _one_writer,
        "write the cache once",
    ),
    Rule("weights are constant", "weights are mapped read-only", _weights_constant),
    Rule("unique inputs", "inputs are bound by name", _unique_names),
    Rule("one output", "outputs are bound by place", _outputs),
    Rule("no complex numbers", "no target has them", _dtypes),
)


#: What a graph must be after the last pass, beside the table.
FOR_TARGETS: tuple[Rule, ...] = (
    Rule(
        "one writer a cache",
        "a target hands a cache on as one value, or orders one write against its readers",
        _whole_writes,
        "join the parts and write the whole cache once; fuse_kda does so for the histories of q, k and v",
    ),
)


def violations(gm: GraphModule, table: Sequence[Rule] = TABLE) -> list[str]:
    """Every violation of the table, as `rule: what`."""
    return [f"{rule.name}: {what}" for rule in table for what in rule.violations(gm)]


def require_valid(gm: GraphModule, after: str) -> None:
    """Raise if a graph breaks the table.

    Args:
        gm: the graph. after: the step that made it, for the message.

    Raises:
        CompileError: naming the step and the first violations.
    """
    found = violations(gm)
    if found:
        shown = "; ".join(found[:3])
        raise CompileError(
            f"{after}: the graph is not valid: {shown}",
            f"this is a bug in {after}; compile without it and report it",
        )


def require_model(gm: GraphModule, when: str, table: Sequence[Rule] = TABLE) -> None:
    """Raise if a graph breaks a table by what the model does, not by a pass.

    Args:
        gm: the graph. when: for the message. table: the rules.

    Raises:
        CompileError: naming the first rule that is broken, why it is there, and its remedy.
    """
    for rule in table:
        for what in rule.violations(gm):
            remedy = rule.remedy or "report it with the model: the tracer makes no such graph"
            raise CompileError(f"{when}: {rule.name}: {what}; {rule.why}", remedy)
