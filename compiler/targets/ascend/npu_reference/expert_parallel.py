"""Dispatch and combine of rows among devices, with every device a thread of this process.

`simulated_group` opens a group by name; each rank's graph then runs in a thread of its own, and the two
operators meet at a barrier, as collectives do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridge.compiler.targets.ascend.npu_reference.moe import dynamic_mx_quant
from hybridge.compiler.targets.ascend.npu_reference.numbers import wide

TIMEOUT = 60.0  # seconds that a rank waits for the others: then one of them has failed
ASSIST = 128  # int32 numbers a row tell combine where the row came from
NO_ROW = -1


class _Group:
    """What ranks hand each other."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._given: list[Any] = [None] * devices
        self._barrier = threading.Barrier(devices)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, once all have given theirs."""
        self._given[rank] = value
        self._barrier.wait(TIMEOUT)
        found = list(self._given)
        self._barrier.wait(TIMEOUT)
        return found

    def fail(self) -> None:
        """Let nobody wait for a rank that is gone."""
        self._barrier.abort()


_GROUPS: dict[str, _Group] = {}


@contextmanager
def simulated_group(name: str, devices: int) -> Iterator[Callable[[], None]]:
    """Open a group for the references; gives a function that frees the others when a rank fails."""
    _GROUPS[name] = _Group(devices)
    try:
        yield _GROUPS[name].fail
    finally:
        del _GROUPS[name]


def _group(name: str, devices: int) -> _Group:
    found = _GROUPS.get(name)
    if found is None or found.devices != devices:
        raise RuntimeError(f"no simulated group {name!r} of {devices} devices is open")
    return found


def _rows_of(sources: list[Tensor], expert: int) -> Iterator[tuple[int, int, int]]:
    """(rank, token, choice) of the pairs that chose an expert, by rank, then token."""
    for rank, ids in enumerate(sources):
        for token, choice in (ids == expert).nonzero().tolist():
            yield rank, token, choice


def moe_distribute_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    quant_mode: int = 0,
    expert_token_nums_type: int = 1,
    shared_expert_rank_num: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rows of all ranks that chose this rank's experts, by expert, then rank, then token.

    (rows [A, H], their scales, whence they came, rows an expert, rows an expert and rank, -, -);
    A = B ranks min(local experts, K), the rest of the rows undefined (here NaN). quant_mode 4: MXFP8
    rows, quantised before they travel. Source: hicann/ops-transformer
    mc2/moe_distribute_dispatch_v2/docs.
    """
    if quant_mode not in (0, 4) or expert_token_nums_type != 1 or shared_expert_rank_num:
        raise NotImplementedError("reference of counts, no shared ranks, quant_mode 0 or 4 only")
    local = moe_expert_num // ep_world_size
    width = min(local, expert_ids.shape[1])
    rows = x.new_full((x.shape[0] * ep_world_size * width, x.shape[1]), torch.nan)
    values, scales = (x, None) if quant_mode == 0 else dynamic_mx_quant(x)
    flat = None if scales is None else scales.flatten(1)
    given = _group(group_ep, ep_world_size).exchange(ep_rank_id, (values, flat, expert_ids))
    received = [
        (expert, *where)
        for expert in range(local)
        for where in _rows_of([ids for _, _, ids in given], ep_rank_id * local + expert)
    ]
    assist = torch.full((len(rows), ASSIST), NO_ROW, dtype=torch.int32)
    counts = torch.zeros(local, ep_world_size, dtype=torch.int64)
    rows = rows if flat is None else rows.to(torch.float8_e4m3fn)
    row_scales = rows.new_zeros(len(rows), dtype=torch.float32)
    if flat is not None:
        row_scales = torch.zeros((len(rows), flat.shape[1]), dtype=torch.uint8)
    for place, (expert, rank, token, choice) in enumerate(received):
        rows[place] = given[rank][0][token]
        if flat is not None:
            row_scales[place] = given[rank][1][token]
        assist[place, :3] = torch.tensor([rank, token, choice], dtype=torch.int32)
        counts[expert, rank] += 1
    nothing = x.new_zeros(0, dtype=torch.int32)
    totals = counts.sum(1)
    ends = counts.flatten().cumsum(0).int()
    return rows, row_scales, assist.flatten(), totals, ends, nothing, nothing.float()


def moe_distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    comm_quant_mode: int = 0,
    **_: Any,
) -> Tensor:
    """sum_k expert_scales[t, k] times what expert k made of token t, from the ranks that made it.

    Source: hicann/ops-transformer mc2/moe_distribute_combine_v2/docs.
    """
    if comm_quant_mode:
        raise NotImplementedError("reference of unquantised rows only")
    count = int(ep_send_counts[-1])
    given = _group(group_ep, ep_world_size).exchange(
        ep_rank_id, (expand_x[:count], assist_info_for_combine.view(-1, ASSIST)[:count, :3])
    )
    total = torch.zeros((expert_ids.shape[0], expand_x.shape[1]), dtype=torch.float32)
    for rows, whence in given:
        for row, (rank, token, choice) in zip(rows, whence.tolist(), strict=True):
            if rank == ep_rank_id:
                total[token] += wide(row) * float(expert_scales[token, choice])
    return total.to(expand_x.dtype)


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu::npu_moe_distribute_dispatch_v2": moe_distribute_dispatch,
    "npu::npu_moe_distribute_combine_v2": moe_distribute_combine,
}
