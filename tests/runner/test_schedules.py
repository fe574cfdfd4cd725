"""Random schedules: whatever comes, waits, is refused or leaves, each sequence computes its own."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridge.artifacts.errors import RunError
from hybridge.runner import Engine

from .toy_model import Toy

ADD = st.tuples(
    st.just("add"), st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 6)
)
OTHER = st.tuples(st.sampled_from(["step", "free", "logits"]), st.just([]), st.integers(0, 9))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ADD | OTHER, max_size=25),
    chunk=st.sampled_from([1, 3, 4, 7, 64]),
    blocks=st.integers(3, 18),
)
def test_each_sequence_computes_its_own(
    open_engine: Callable[..., Engine], actions: list, chunk: int, blocks: int
) -> None:
    toy = Toy()
    engine = Engine(open_engine(blocks=blocks).model, prefill_chunk=chunk)
    expected: dict[int, tuple[list[int], int]] = {}
    for kind, prompt, number in actions:
        try:
            if kind == "add":
                expected[engine.add(prompt, number)] = (prompt, number)
            elif kind == "step":
                engine.step()
            elif kind == "logits":
                engine.logits([number] * 3)
            elif expected:
                chosen = sorted(expected)[number % len(expected)]
                engine.free(chosen)
                del expected[chosen]
        except RunError as error:
            if "needed" not in error.message:  # no room, and nothing else
                raise
    while engine.active:
        engine.step()
    for sequence, (prompt, count) in expected.items():
        assert engine.tokens(sequence) == toy.greedy(prompt, count)
    assert engine.free_slots == engine.model.capacity.slots
    assert engine.free_blocks == blocks
