"""The registry of fused ops: one value an op, registered with torch once, read by every room.

An op that mutates gets a functional twin, `<name>_functional`, that leaves its arguments alone and returns the
new values after the op's own outputs. Graphs are traced and rewritten with the in-place form, in which the order of
nodes is the meaning; a target that needs values instead (ONNX, GE) asks for the twin.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LIBRARY = torch.library.Library("hybridge", "DEF")
_ARGUMENT = re.compile(
    r"^(?P<type>Tensor\?|Tensor\(\w!\)|Tensor|int|float\?|float|bool|str) (?P<name>\w+)"
)


@dataclass(frozen=True)
class Constraint:
    """A rule on an op's operands, as data.

    Args:
        operand: the argument the rule is about.
        rule: the rule in words, such as "last dimension is a multiple of 32".
        why: what goes wrong otherwise, or the source of the rule.
    """

    operand: str
    rule: str
    why: str


@dataclass(frozen=True)
class FusedOp:
    """One op of the vocabulary.

    Args:
        name: the name in the torch namespace `hybridge`.
        signature: the torch schema after the name, `(...) -> ...`; mutated tensors are marked `Tensor(a!)`.
        reference: plain PyTorch; this is the definition of the op. It mutates the marked arguments.
        fake: the outputs' shapes and dtypes from fake inputs; reads no data and mutates nothing.
        constraints: rules on the operands.
    """

    name: str
    signature: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    constraints: tuple[Constraint, ...] = ()

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """(name, torch type) of every argument, in order, keyword-only ones last."""
        inside = self.signature[1 : self.signature.rindex(") ->")]
        matches = (_ARGUMENT.match(part) for part in inside.split(", "))
        return tuple((match["name"], match["type"]) for match in matches if match)

    @property
    def tensor_arguments(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.arguments if kind.startswith("Tensor"))

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the arguments that are not tensors; all of them change the result."""
        return tuple(name for name, kind in self.arguments if not kind.startswith("Tensor"))

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that the op writes to: its whole effect."""
        return tuple(name for name, kind in self.arguments if "!" in kind)

    @property
    def output_count(self) -> int:
        """How many values the in-place op returns."""
        returns = self.signature[self.signature.rindex("->") + 2 :].strip()
        return 0 if returns == "()" else returns.count("Tensor")

    @property
    def onnx_type(self) -> str:
        """The op type in the ONNX domain `hybridge`."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def overload(self) -> Any:
        """`torch.ops.hybridge.<name>.default`."""
        return getattr(torch.ops.hybridge, self.name).default

    @property
    def functional(self) -> Any:
        """The overload without effects: the op itself, or its functional twin."""
        suffix = "_functional" if self.mutated else ""
        return getattr(torch.ops.hybridge, self.name + suffix).default


vocabulary: dict[str, FusedOp] = {}


def register(op: FusedOp) -> FusedOp:
    """Define `op` (and its functional twin if it mutates) in torch and add it to the vocabulary."""
    vocabulary[op.name] = op
    _define(op.name, op.signature, op.reference, op.fake)
    if op.mutated:
        _define(f"{op.name}_functional", _functional_signature(op), *_functional_kernels(op))
    return op


def find(overload: Any) -> FusedOp | None:
    """The vocabulary's op behind a torch overload (either form), or None."""
    name = getattr(overload, "_schema", None)
    if name is None or not name.name.startswith("hybridge::"):
        return None
    return vocabulary.get(name.name.removeprefix("hybridge::").removesuffix("_functional"))


def _define(
    name: str, signature: str, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"hybridge::{name}", fake, lib=_LIBRARY)


def _functional_signature(op: FusedOp) -> str:
    inside = re.sub(r"Tensor\(\w!\)", "Tensor", op.signature[: op.signature.rindex("->")])
    count = op.output_count + len(op.mutated)
    returns = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
    return f"{inside}-> {returns}"


def _functional_kernels(op: FusedOp) -> tuple[Callable[..., Any], Callable[..., Any]]:
    names = [name for name, _ in op.arguments]
    places = {name: names.index(name) for name in op.mutated}

    def collect(result: Any, written: list[torch.Tensor]) -> Any:
        own = () if result is None else result if isinstance(result, tuple) else (result,)
        every = (*own, *written)
        return every[0] if len(every) == 1 else every

    def kernel(*args: Any, **attributes: Any) -> Any:
        values = list(args)
        for place in places.values():
            values[place] = values[place].clone()
        result = op.reference(*values, **attributes)
        return collect(result, [values[place] for place in places.values()])

    def fake(*args: Any, **attributes: Any) -> Any:
        result = op.fake(*args, **attributes)
        return collect(result, [torch.empty_like(args[place]) for place in places.values()])

    return kernel, fake
