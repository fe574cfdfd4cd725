"""Breaks a valid call in one place, for `make fuzz`: shape, type, presence, integer or attribute."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .cases import Arrays, Case
from .harness import BFLOAT16
from .test_door import INTEGERS, must_refuse, resized

FLOATS = (np.dtype(np.float32), BFLOAT16)
DTYPES = (*FLOATS, np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint8))
OPTIONAL_ATTRIBUTES = {"bf16_activations", "linear_beta", "lower_bound"}
MOST_RANK = 8
WRITES = {"PagedWrite": "cache", "StateWrite": "state"}


class Outcome(enum.IntEnum):
    """What a call has to do, as replay.cpp reads it."""

    RETURNS = 0
    REFUSED = 1
    EITHER = 2


@dataclass(frozen=True)
class Drawn:
    """A call, what it has to do, and how it was broken."""

    case: Case
    outcome: Outcome
    what: str

    def describe(self) -> str:
        lines = [f"{self.case.op}, {self.what}: {self.outcome.name.lower()}"]
        for name, array in self.case.inputs.items():
            lines.append(f"  {name}: " + ("absent" if array is None else described(array)))
        lines.append(f"  attributes {self.case.attributes}, in place {self.case.alias}")
        return "\n".join(lines)


def described(array: np.ndarray) -> str:
    values = f" {array.tolist()}" if array.dtype == np.int32 and array.size <= 64 else ""
    return f"{array.dtype} {list(array.shape)}{values}"


def outputs_for(case: Case) -> dict[str, object]:
    """The outputs' types, one of which is that of an input."""
    written = case.inputs.get(WRITES.get(case.op, ""))
    if written is None or written.dtype not in FLOATS:
        return case.outputs
    return dict.fromkeys(case.outputs, written.dtype)


def changed(case: Case, inputs: Arrays) -> Case:
    case = replace(case, inputs=case.inputs | inputs, _operators={})
    return replace(case, outputs=outputs_for(case))


def either_unless(refused: bool) -> Outcome:
    return Outcome.REFUSED if refused else Outcome.EITHER


def some_input(case: Case, rng: np.random.Generator) -> tuple[str, np.ndarray]:
    given = [name for name, array in case.inputs.items() if array is not None]
    name = given[rng.integers(len(given))]
    return name, case.inputs[name]


def other_rank(case: Case, rng: np.random.Generator) -> Drawn:
    name, array = some_input(case, rng)
    lead = (1,) * (MOST_RANK + 1 - array.ndim)
    shapes = [(1, *array.shape), (*array.shape, 1), (*lead, *array.shape), (array.size,), ()]
    shapes = [shape for shape in shapes if len(shape) != array.ndim]
    shape = shapes[rng.integers(len(shapes))]
    other = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    any_rank = case.op in ("Linear", "LinearPacked", "RmsNorm") and name == "x"
    refused = not any_rank or len(shape) in (0, MOST_RANK + 1)
    return Drawn(changed(case, {name: other}), either_unless(refused), f"{name} as {shape}")


def other_size(case: Case, rng: np.random.Generator) -> Drawn:
    name, array = some_input(case, rng)
    axis = int(rng.integers(array.ndim))
    size = array.shape[axis]
    sizes = {0, size + 1, max(size - 1, 0), size * 2, int(rng.integers(0, 300))} - {size}
    other = resized(array, axis, int(rng.choice(sorted(sizes))))
    refused = axis not in case.free.get(name, ())
    what = f"{name} as {list(other.shape)}"
    return Drawn(changed(case, {name: other}), either_unless(refused), what)


def huge_size(case: Case, rng: np.random.Generator) -> Drawn | None:
    """Beside a zero any size is possible; sizes must not be computed from it."""
    name, array = some_input(case, rng)
    if array.ndim < 2:
        return None
    sizes = rng.choice([2**20, 2**31 - 1, 2**31, 2**33, 2**62], array.ndim)
    sizes[rng.integers(array.ndim)] = 0
    with np.errstate(all="ignore"):
        try:
            other = np.zeros(tuple(int(size) for size in sizes), array.dtype)
        except ValueError:  # numpy does not make it either
            return None
    return Drawn(changed(case, {name: other}), Outcome.EITHER, f"{name} as {list(other.shape)}")


def other_type(case: Case, rng: np.random.Generator) -> Drawn:
    name, array = some_input(case, rng)
    others = [dtype for dtype in DTYPES if dtype != array.dtype]
    dtype = others[rng.integers(len(others))]
    data = rng.integers(0, 256, array.size * dtype.itemsize, np.uint8)
    other = data.view(dtype).reshape(array.shape)
    two_types = array.dtype in FLOATS and dtype in FLOATS
    return Drawn(changed(case, {name: other}), either_unless(not two_types), f"{name} as {dtype}")


def absent(case: Case, rng: np.random.Generator) -> Drawn:
    name, _ = some_input(case, rng)
    refused = name != "g_b_weight"
    return Drawn(changed(case, {name: None}), either_unless(refused), f"{name} absent")


def fewer(case: Case, rng: np.random.Generator) -> Drawn:
    """The last inputs not even named."""
    kept = int(rng.integers(len(case.inputs)))
    inputs = dict(list(case.inputs.items())[:kept])
    cut = replace(case, inputs=inputs, alias={}, _operators={})
    return Drawn(cut, Outcome.REFUSED, f"only {kept} inputs")


def some_integer(
    case: Case, rng: np.random.Generator
) -> tuple[str, np.ndarray, tuple[int, ...]] | None:
    names = [
        name for name, a in case.inputs.items() if a is not None and a.dtype == np.int32 and a.size
    ]
    if not names:
        return None
    name = names[rng.integers(len(names))]
    array = case.inputs[name].copy()
    return name, array, tuple(int(rng.integers(size)) for size in array.shape)


def with_integer(
    case: Case, chosen: tuple[str, np.ndarray, tuple[int, ...]] | None, value: Callable[[str], int]
) -> Drawn | None:
    if chosen is None:
        return None
    name, array, index = chosen
    new = value(name)
    refused = array[index] != new and must_refuse(case, name, index, new)
    array[index] = new
    return Drawn(
        changed(case, {name: array}), either_unless(refused), f"{name}{list(index)} = {new}"
    )


def wild_integer(case: Case, rng: np.random.Generator) -> Drawn | None:
    return with_integer(case, some_integer(case, rng), lambda _: int(rng.choice(INTEGERS)))


def previous_integer(case: Case, rng: np.random.Generator) -> Drawn | None:
    """The first number that is too small; -1 is "none" where there may be none."""
    optional = ("positions", "slot_mapping", "state_slot")
    return with_integer(case, some_integer(case, rng), lambda name: -1 - (name in optional))


def next_integer(case: Case, rng: np.random.Generator) -> Drawn | None:
    """The first number that is one too many."""
    chosen = some_integer(case, rng)
    if chosen is None:
        return None
    name, array, index = chosen
    first = first_beyond(case, name, index)
    if first is None or first >= 2**31:
        return None
    array[index] = first
    what = f"{name}{list(index)} = {first}, one too many"
    return Drawn(changed(case, {name: array}), Outcome.REFUSED, what)


def first_beyond(case: Case, name: str, index: tuple[int, ...]) -> int | None:
    """The least value that is too large there; None where any may stand."""
    inputs = case.inputs
    if name == "slot_mapping":
        return int(np.prod(inputs["cache"].shape[:2]))
    if name == "state_slot":
        return len(inputs["state"])
    if name == "expert_ids":
        return len(inputs["gate_up" if "gate_up" in inputs else "gate_up_packed"])
    if name == "query_start":
        tokens = len(next(iter(inputs.values())))
        return tokens + 1 if index[0] else 1
    if name in ("block_table", "positions", "context_len"):
        return first_beyond_sequence(case, name, index)
    return None


def first_beyond_sequence(case: Case, name: str, index: tuple[int, ...]) -> int | None:
    inputs = case.inputs
    if "query_start" not in inputs:
        return None
    starts, contexts = inputs["query_start"], inputs["context_len"]
    if name == "positions":
        b = int(np.searchsorted(starts, index[0], side="right")) - 1
        return int(contexts[b] + index[0] - starts[b] + 1) if index[0] < starts[-1] else None
    count = int(starts[index[0] + 1] - starts[index[0]])
    cache = inputs.get("latent_cache", inputs.get("indexer_cache"))
    if count == 0 or cache is None:
        return None
    if name == "context_len":
        return inputs["block_table"].shape[1] * cache.shape[1] - count + 1
    used = index[1] * cache.shape[1] < count + contexts[index[0]]
    return len(cache) if used else None


def used_twice(case: Case, rng: np.random.Generator) -> Drawn | None:
    name = "slot_mapping" if "slot_mapping" in case.inputs else "state_slot"
    slots = case.inputs.get(name)
    if slots is None or not (slots >= 0).any() or len(slots) < 2:
        return None
    source = rng.choice(np.flatnonzero(slots >= 0))
    target = rng.choice(np.setdiff1d(np.arange(len(slots)), source))
    slots = slots.copy()
    slots[target] = slots[source]
    return Drawn(changed(case, {name: slots}), Outcome.REFUSED, f"{name} {slots[source]} twice")


def falling_starts(case: Case, rng: np.random.Generator) -> Drawn | None:
    starts = case.inputs.get("query_start")
    if starts is None or len(starts) < 3:
        return None
    starts = starts.copy()
    at = int(rng.integers(1, len(starts) - 1))
    starts[at] = starts[at + 1] + 1
    return Drawn(changed(case, {"query_start": starts}), Outcome.REFUSED, "query_start falls")


def other_attribute(case: Case, rng: np.random.Generator) -> Drawn | None:
    if not case.attributes:
        return None
    name = list(case.attributes)[rng.integers(len(case.attributes))]
    value = case.attributes[name]
    attributes = dict(case.attributes)
    outcome, new = Outcome.EITHER, None
    if rng.random() < 0.3:
        del attributes[name]
        outcome = either_unless(name not in OPTIONAL_ATTRIBUTES)
    else:
        new, outcome = bad_value(case, name, value, rng)
        attributes[name] = new
    what = f"attribute {name} " + ("missing" if new is None else f"= {new!r}")
    return Drawn(replace(case, attributes=attributes, _operators={}), outcome, what)


def most_value_dim(case: Case) -> int:
    if case.op == "MlaExpandValue":
        return len(case.inputs["kv_b_weight"]) // case.inputs["latent"].shape[1]
    return case.inputs["query"].shape[2]


def bad_value(
    case: Case, name: str, value: object, rng: np.random.Generator
) -> tuple[object, Outcome]:
    if isinstance(value, str):
        return str(rng.choice(["", "relu", "x" * 5000])), Outcome.REFUSED
    if rng.random() < 0.1:  # of another type
        other = "text" if isinstance(value, int) else 3
        return other, either_unless(name not in OPTIONAL_ATTRIBUTES)
    if isinstance(value, float):
        number = float(rng.choice([np.nan, np.inf, -np.inf, -1.0, 0.0]))
        positive = name in ("beta", "linear_beta", "scale") and case.op != "MoeRoute"
        return number, either_unless(positive)
    limits = {
        "site": lambda: len(case.inputs["numerator"]),
        "value_dim": lambda: most_value_dim(case) + 1,
    }
    if name == "top_k" and case.op == "MoeRoute":
        limits["top_k"] = lambda: len(case.inputs["gate_weight"]) + 1
    numbers = [-1, -(2**63), *([0] if name != "site" else [])]
    numbers += [limits[name](), 2**63 - 1] if name in limits else []
    limited = name in ("site", "value_dim", "top_k")
    return numbers[rng.integers(len(numbers))], either_unless(limited)


FAULTS: tuple[Callable[[Case, np.random.Generator], Drawn | None], ...] = (
    other_rank,
    other_size,
    huge_size,
    other_type,
    absent,
    fewer,
    wild_integer,
    previous_integer,
    next_integer,
    next_integer,  # the most likely mistake of a check
    used_twice,
    falling_starts,
    other_attribute,
)


def broken(case: Case, rng: np.random.Generator) -> Drawn:
    """The call with one fault of those that apply to it."""
    for index in rng.permutation(len(FAULTS)):
        drawn = FAULTS[index](case, rng)
        if drawn is not None:
            return drawn
    raise AssertionError("a rank can always be changed")
