"""The same model in plain PyTorch, as fast as PyTorch makes it: what hybridge is compared with.

The eager model of this repository is a definition: its data-dependent parts are written to be read. Here these parts
(experts, the chunked recurrence, cache writes) are what a PyTorch user would write for speed, in the model's own
precision; all else is the eager model. No hybridge op is called. This is the model as given to eager PyTorch,
torch.compile and AOTInductor; what is tuned beyond that is in `whole_model.Inductor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as functional
from torch import Tensor

from hybridge.models.layers import Linear

CHUNK = 16


def paged_write(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """As the op, where every token has a slot."""
    cache.flatten(0, 1).index_copy_(0, slot_mapping.long(), rows.to(cache.dtype))


def state_write(state: Tensor, rows: Tensor, state_slot: Tensor) -> None:
    """As the op, where every row has a slot."""
    state.index_copy_(0, state_slot.long(), rows.to(state.dtype))


def _experts_loop(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """Each chosen expert on its tokens: one matrix product an expert."""
    output = torch.zeros(x.shape, dtype=torch.float32)
    for expert in expert_ids.unique().tolist():
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        hidden = _situ(functional.linear(x[tokens], gate_up[expert]), beta, linear_beta)
        result = functional.linear(hidden, down[expert])
        output.index_add_(0, tokens, result.float() * expert_weights[tokens, places, None])
    return output.to(x.dtype)


def _situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    bounded = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded


def _experts_gather(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """The chosen experts' weights gathered: no loop, so that a compiler can fuse the gather."""
    chosen = expert_ids.long()
    inner = (gate_up[chosen] * x[:, None, None, :]).sum(-1)
    hidden = _situ(inner, beta, linear_beta)
    result = (down[chosen] * hidden[:, :, None, :]).sum(-1)
    return (result * expert_weights[..., None]).sum(1).to(x.dtype)


experts_loop = torch.library.custom_op("baseline::experts_loop", _experts_loop, mutates_args=())
experts_loop.register_fake(lambda x, *_: torch.empty_like(x))


def chunked_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    """The chunked form of spec MODELS.md 3.2 for one sequence, chunks side by side but for the state."""
    tokens, heads, width = query.shape

    def split(part: Tensor) -> Tensor:
        return part.float().view(-1, CHUNK, heads, part.shape[-1]).transpose(1, 2)

    q, k, v, g = split(query), split(key), split(value), split(log_decay)
    strength = beta.float().view(-1, CHUNK, heads).transpose(1, 2).unsqueeze(-1)
    total = g.cumsum(2)
    lead, inverse, last = total.exp(), (-total).exp(), total[:, :, -1:]
    inner = (strength * ((k * lead) @ (k * inverse).mT)).tril(-1)
    identity = torch.eye(CHUNK)
    right = strength * torch.cat([v, k * lead], -1)
    solved = torch.linalg.solve_triangular(identity + inner, right, upper=False, unitriangular=True)
    new, weighted = solved[..., :width], solved[..., width:]
    attention = ((q * lead) @ (k * inverse).mT).tril()
    ends = (k * (last - total).exp()).mT
    outputs = []
    state = memory.float()
    for index in range(tokens // CHUNK):
        delta = new[index] - weighted[index] @ state
        outputs.append((q * lead)[index] @ state + attention[index] @ delta)
        state = last[index].exp().mT * state + ends[index] @ delta
    return torch.stack(outputs).transpose(1, 2).reshape(tokens, heads, width), state


def _kda_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    state_slot: Tensor,
) -> Tensor:
    """One sequence whose length is a multiple of the chunk: all that the benchmark asks for."""
    slot = int(state_slot[0])
    memory = state[slot] if int(context_len[0]) else torch.zeros_like(state[slot])
    output, new = chunked_recurrence(query, key, value, log_decay, beta, memory)
    state[slot] = new.to(state.dtype)
    return output.to(value.dtype)


kda_recurrence = torch.library.custom_op(
    "baseline::kda_recurrence", _kda_recurrence, mutates_args=("state",)
)
kda_recurrence.register_fake(lambda query, key, value, *_: torch.empty_like(value))


class _Ops:
    """Stands where the eager model calls `torch.ops.hybridge`."""

    def __init__(self, gather_experts: bool) -> None:
        self.paged_write, self.state_write = paged_write, state_write
        self.kda_recurrence = kda_recurrence
        self._gather = gather_experts

    def moe_experts(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        activation: str,
        beta: float,
        linear_beta: float,
    ) -> Tensor:
        assert activation == "situ"
        form = _experts_gather if self._gather else experts_loop
        return form(x, expert_ids, expert_weights, gate_up, down, beta, linear_beta)


def _linear(layer: Linear, x: Tensor) -> Tensor:
    """States are fp32: what they touch goes back to the weights' precision at the next product."""
    return functional.linear(x.to(layer.weight.dtype), layer.weight)


@contextmanager
def plain_ops(*, gather_experts: bool = False) -> Iterator[None]:
    """Within, the eager model calls plain PyTorch in place of hybridge's ops."""
    with (
        mock.patch.object(torch.ops, "hybridge", _Ops(gather_experts)),
        mock.patch.object(Linear, "forward", _linear),
    ):
        yield
