"""Where the KDA layers of a graph are: their states, and the nodes between the reads and the writes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from hybridge.ir import region as regions
from hybridge.ir.effects import op_name, written_arguments
from hybridge.ir.pass_base import PassContext, Refusal
from hybridge.ir.pattern import Projection, projection
from hybridge.ir.signature import is_weight, shape_of

WRITE = "hybridge::state_write"
RECURRENCE = "hybridge::kda_recurrence"


@dataclass(frozen=True)
class Found:
    """One layer's states and the nodes around them.

    Args:
        reads, writes: of both states; the last write is the recurrent state's.
        end: what the region computes: the recurrence's result, or in decode the gated norm.
        output: the layer's output projection in decode, where the region goes up to it.
    """

    conv_state: Node
    state: Node
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    end: Node
    output: Projection | None

    @property
    def decode(self) -> bool:
        return self.output is not None

    @property
    def conv_writes(self) -> tuple[Node, ...]:
        return self.writes[:-1]


def kda_sites(context: PassContext) -> Iterator[Found | Refusal]:
    """Every layer whose convolution state leads to a recurrent one, once; refusals of those that cannot be one op."""
    layers: dict[Node, list[Found | Refusal]] = {}
    for conv_state in context.graph.nodes:
        if conv_state.op == "placeholder" and _is_conv_state(conv_state):
            state, found = _find(conv_state, context)
            if state is not None and found is not None:
                layers.setdefault(state, []).append(found)
    for state, sites in layers.items():
        yield sites[0] if len(sites) == 1 else _several(state, sites)


def _several(state: Node, found: Sequence[Found | Refusal]) -> Refusal:
    """Separate states for q, k and v are other inputs than the op's one, and inputs are not a pass's to change."""
    sites = [each for each in found if isinstance(each, Found)]
    # In decode the state does not depend on q, and so not on q's history: the result does.
    parts = sorted({part for each in sites for part in _conv_states_of(each.end)})
    anchor = sites[0].writes[-1].name if sites else state.name
    names = " and ".join(part.name for part in parts)
    return Refusal(
        anchor,
        "one conv_state",
        f"{names} are {len(parts)} inputs of the graph; the op updates one conv_state "
        "[slots, q|k|v, taps - 1], which the graph signature has and the runner allocates, and no pass changes the "
        "inputs of a graph",
        "keep the histories of q, k and v in one conv_state, in this order; their convolutions may stay separate",
    )


def _conv_states_of(end: Node) -> list[Node]:
    """The convolution states that a node is computed from within its layer, that is, after its projections."""
    pending, seen = [end], {end}
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in seen and projection(node) is None:
                seen.add(node)
                pending.append(node)
    return [node for node in seen if node.op == "placeholder" and _is_conv_state(node)]


def _is_conv_state(node: Node) -> bool:
    """Whether an input has the form [slots, channels, taps - 1]."""
    shape = shape_of(node)
    return shape is not None and len(shape) == 3 and not is_weight(node)


def _find(conv_state: Node, context: PassContext) -> tuple[Node | None, Found | Refusal | None]:
    """The recurrent state that a convolution state leads to, and the layer around both."""
    reads = [user for user in conv_state.users if not written_arguments(user)]
    writes = context.effects.writes_to(conv_state)
    if not reads or not writes:
        return None, None
    for node in regions.forward(reads, limit=200):
        for state in written_arguments(node):
            wide = shape_of(state)
            if state.op == "placeholder" and wide is not None and len(wide) == 4:
                return state, _around(conv_state, state, reads, [*writes, node])
    return None, None


def _around(
    conv_state: Node, state: Node, reads: Sequence[Node], writes: Sequence[Node]
) -> Found | Refusal | None:
    kept = tuple(node for node in writes if op_name(node) in (WRITE, RECURRENCE))
    last = writes[-1]
    if len(kept) < 2 or last not in kept:
        return _unguarded(next(node for node in writes if node not in kept))
    if op_name(last) == RECURRENCE:
        return Found(conv_state, state, tuple(reads), kept, last, None)
    more = [user for user in state.users if not written_arguments(user)]
    for node in regions.forward([*reads, *more], limit=200):
        output = projection(node)
        if output is not None:
            return Found(conv_state, state, (*reads, *more), kept, output.x, output)
    return None


def _unguarded(write: Node) -> Refusal:
    """A plain index assignment has no place for a row without a state: slot -1 is the last one to it."""
    return Refusal(
        write.name,
        "rows without a state write none",
        f"{write.name} writes a state by {op_name(write)}, for which slot -1 is the last slot",
        "write states by hybridge::state_write, which leaves rows with slot -1 alone",
    )


def needed_by(outputs: Iterable[Node], nodes: Sequence[Node]) -> list[Node]:
    """Those of `nodes` that the outputs are computed from, without going through another of them."""
    wanted, met = set(nodes), set()
    pending, seen = list(outputs), set()
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in wanted:
                met.add(node)
            elif node not in seen:
                seen.add(node)
                pending.append(node)
    return [node for node in nodes if node in met]
