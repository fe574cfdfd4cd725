"""`paged_write` and `state_write`: the only writers of caches and of recurrent states."""

from __future__ import annotations

from torch import Tensor

from hybridge.ops.registry import Constraint, FusedOp, register


def paged_write_reference(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Write row t of `rows` to the cache row `slot_mapping[t]`; -1 writes nothing.

    Args:
        cache: [blocks, block, ...], written in place; a cache row is block_id * block + offset.
        rows: [T, ...], the shape of a cache row after T.
        slot_mapping: [T] integer.
    """
    keep = slot_mapping >= 0
    flat = cache.view(cache.shape[0] * cache.shape[1], *cache.shape[2:])
    flat[slot_mapping[keep].long()] = rows[keep].to(cache.dtype)


def state_write_reference(state: Tensor, rows: Tensor, state_slot: Tensor) -> None:
    """Write row b of `rows` to `state[state_slot[b]]`; -1 (an inactive row) writes nothing.

    Args:
        state: [slots, ...], written in place.
        rows: [B, ...].
        state_slot: [B] integer.
    """
    keep = state_slot >= 0
    state[state_slot[keep].long()] = rows[keep].to(state.dtype)


def no_output(*_args: Tensor) -> None:
    """The fake kernel of an op whose only effect is its write."""


_ONE_WRITER = Constraint(
    "slot_mapping", "a row is written at most once", "two writes of one row have no order"
)

PAGED_WRITE = register(
    FusedOp(
        name="paged_write",
        signature="(Tensor(a!) cache, Tensor rows, Tensor slot_mapping) -> ()",
        reference=paged_write_reference,
        fake=no_output,
        constraints=(_ONE_WRITER,),
    )
)

STATE_WRITE = register(
    FusedOp(
        name="state_write",
        signature="(Tensor(a!) state, Tensor rows, Tensor state_slot) -> ()",
        reference=state_write_reference,
        fake=no_output,
        constraints=(
            Constraint(
                "state_slot", "a slot appears once", "two writes of one state have no order"
            ),
        ),
    )
)
