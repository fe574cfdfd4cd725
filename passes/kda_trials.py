"""Trials of a KDA layer: the region beside the fused op's definition, both states included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from hybridge.ir.batch import FIRST_BATCH, Batch, batch_shape, batches, bind_sizes
from hybridge.ir.evaluate import Sizes
from hybridge.ir.pass_base import PassContext
from hybridge.ir.proof import Trial, Verdict, prove
from hybridge.ir.signature import DECODE, metadata, shape_of
from hybridge.ops.registry import vocabulary
from hybridge.passes.kda_operands import PARTS, TABLES, Roles

# The recurrence multiplies rounding errors; what a wrong gate, eps or tap changes is far larger.
_TOLERANCE = 5e-5


def prove_kda(context: PassContext, roles: Roles) -> Verdict:
    """Whether the region leaves both states, and gives the core (or gated) result, as the op does."""
    found = roles.found
    inputs = metadata(context.graph)
    names = sorted(roles.operands)
    given = [node for name in names for node in roles.operands[name].nodes]
    given += [found.conv_state, found.state, *inputs.values()]
    axes = [roles.operands[name].axes for name in names]
    label = f"kda {found.decode} {roles.lower_bound!r} {roles.norm_eps!r} {names} {axes}"
    return prove(
        context,
        label,
        [found.end],
        given,
        lambda: _trials(context, roles),
        tolerance=_TOLERANCE,
        writes=found.writes,
    )


@dataclass(frozen=True)
class _Sizes:
    """How large a trial's numbers are: q and k, v and the recurrent state, and the gates."""

    rule: str
    keys: float = 1.0
    values: float = 1.0
    gates: float = 1.0


_VARIANTS = (
    _Sizes("convolution, norms, gates and delta rule as in the definition"),
    # Values stay large, so that a wrong length shows in full.
    _Sizes("1e-6 is added inside the root of the L2 norms", keys=1e-3),
    # The output norm hides how long q is, unless its own eps counts.
    _Sizes("1e-6 is added inside the root of the L2 norms", keys=1e-3, values=3e-3),
    _Sizes("eps is added inside the root of the output norm", values=3e-3),
    _Sizes("gates far from zero", gates=12.0),
)


def _trials(context: PassContext, roles: Roles) -> Iterator[tuple[Trial, Sizes]]:
    found = roles.found
    shape = batch_shape(context.graph, context.phase == DECODE, state=found.state)
    for batch in batches(shape):
        # What the numbers are does not depend on the batch: the first one shows it.
        for drawn in _VARIANTS[: None if batch.name == FIRST_BATCH else 1]:
            sizes = Sizes()
            given: dict[Node, Tensor] = bind_sizes(context.graph, batch, sizes)
            tokens, slots = (shape_of(found.end) or ())[0], (shape_of(found.state) or ())[0]
            if not sizes.bind(tokens, batch.tokens) or not sizes.bind(slots, batch.slots):
                continue
            generator = torch.Generator().manual_seed(5)
            values = _draw(roles, sizes, drawn, generator)
            history, memory = (sizes.shape(node) for node in (found.conv_state, found.state))
            states = {
                found.conv_state: torch.randn(history, generator=generator)
                * _channels(history[1], drawn)[:, None],
                found.state: torch.randn(memory, generator=generator) * 0.5 * drawn.values,
            }
            for name, operand in roles.operands.items():
                given |= operand.to_nodes(values[name])
            given |= {node: value.clone() for node, value in states.items()}
            expected = _expected(roles, batch, values, states)
            where = "" if batch.name == FIRST_BATCH else f" on a batch with {batch.name}"
            rows = _active_rows(batch)
            yield Trial(drawn.rule + where, given, [expected], rows, states), sizes


def _channels(count: int, drawn: _Sizes) -> Tensor:
    """[3P]: the size of each channel of q, k and v."""
    third = count // len(PARTS)
    return torch.tensor([drawn.keys] * (2 * third) + [drawn.values] * third)


def _draw(
    roles: Roles, sizes: Sizes, drawn: _Sizes, generator: torch.Generator
) -> dict[str, Tensor]:
    values = {}
    for name, operand in roles.operands.items():
        wanted = [sizes.of(size) for size in operand.sizes()]
        values[name] = torch.randn(wanted, generator=generator)
        if name == "qkv":
            values[name] *= _channels(wanted[1], drawn)
        elif name in ("gate", "beta", "output_gate"):
            values[name] *= drawn.gates
    return values


def _expected(
    roles: Roles, batch: Batch, values: Mapping[str, Tensor], states: Mapping[Node, Tensor]
) -> Tensor:
    """What the definition gives; updates `states` as it does."""
    tables = batch.inputs()
    core: Tensor = vocabulary["kda_prefill"].reference(
        *(values[name] for name in ("qkv", "gate", "beta", "conv_weight", "a_log", "dt_bias")),
        states[roles.found.conv_state],
        states[roles.found.state],
        *(tables[name] for name in TABLES),
        lower_bound=roles.lower_bound,
    )
    if roles.norm_eps is None:
        return core
    normed: Tensor = vocabulary["rms_norm"].reference(
        core, values["norm_weight"], eps=roles.norm_eps
    )
    return normed.flatten(1) * torch.sigmoid(values["output_gate"])


def _active_rows(batch: Batch) -> Tensor:
    """[T] bool: tokens of sequences that have a state; the others' results are read by nobody."""
    rows = [batch.active[batch.sequence_of(token)] for token in range(batch.real_tokens)]
    return torch.tensor(rows + [False] * (batch.tokens - batch.real_tokens))
