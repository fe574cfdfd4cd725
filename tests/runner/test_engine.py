"""The engine against the toy's definition: whatever the schedule, a sequence computes its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybridge.artifacts.errors import RunError, UsageError
from hybridge.runner import Engine, SamplingOptions
from hybridge.runner.batch import Row, build_batch

from .toy_model import Toy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
OTHERS = [[7], [30, 2, 2, 8, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
LIMIT = 1e-5


def finish(engine: Engine) -> None:
    while engine.active:
        engine.step()


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 11, 100])
def test_chunked_prefill_equals_one_pass(engine: Engine, toy: Toy, chunk: int) -> None:
    got = engine.logits(PROMPT, prefill_chunk=chunk)
    assert got.shape == (len(PROMPT), toy.vocab)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, toy.logits(PROMPT), atol=LIMIT)


@pytest.mark.parametrize("start", [0, 1, 4, 10, 11, 50])
def test_prefill_then_decode_equals_one_pass(engine: Engine, toy: Toy, start: int) -> None:
    got = engine.logits(PROMPT, decode_from=start)
    np.testing.assert_allclose(got, toy.logits(PROMPT), atol=LIMIT)


def test_generate(engine: Engine, toy: Toy) -> None:
    assert list(engine.generate(PROMPT, 9)) == toy.greedy(PROMPT, 9)
    assert engine.free_blocks == engine.model.capacity.blocks
    assert engine.free_slots == engine.model.capacity.slots


def test_generate_streams(engine: Engine, toy: Toy) -> None:
    stream = engine.generate(PROMPT, 9)
    assert [next(stream), next(stream)] == toy.greedy(PROMPT, 2)
    assert len(engine.active) == 1
    stream.close()
    assert engine.active == ()
    assert engine.free_slots == engine.model.capacity.slots


@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_a_batch_computes_what_each_alone_computes(engine: Engine, toy: Toy, chunk: int) -> None:
    engine = Engine(engine.model, prefill_chunk=chunk)
    ids = [engine.add(prompt, 6) for prompt in OTHERS]
    finish(engine)
    for sequence, prompt in zip(ids, OTHERS, strict=True):
        assert engine.tokens(sequence) == toy.greedy(prompt, 6)
        assert engine.finish_reason(sequence) == "length"


def test_sequences_come_and_go(engine: Engine, toy: Toy) -> None:
    first = engine.add(OTHERS[0], 12)
    engine.step()
    second = engine.add(OTHERS[1], 12)
    engine.step()
    engine.free(first)  # in the middle: its slot and blocks go to the next
    third = engine.add(OTHERS[2], 4)
    finish(engine)
    assert engine.tokens(second) == toy.greedy(OTHERS[1], 12)
    assert engine.tokens(third) == toy.greedy(OTHERS[2], 4)


def test_a_used_slot_starts_from_zero(engine: Engine, toy: Toy) -> None:
    for state in engine.model.states.values():
        state[...] = np.nan if state.shape[0] == engine.model.capacity.slots else 1e3
    for _ in range(5):
        assert list(engine.generate(PROMPT, 3)) == toy.greedy(PROMPT, 3)


def test_padding_changes_no_state(engine: Engine, toy: Toy) -> None:
    """Padded tokens and rows, in both phases: logits as without, no row of a state touched."""
    model = engine.model
    used = {"kda_state_0": [1], "latent_cache_1": [2, 3]}
    blocks, slot = [3, 2], 1
    for phase, tokens, context in (("prefill", PROMPT[:6], 0), ("decode", PROMPT[6:7], 6)):
        before = {name: state.copy() for name, state in model.states.items()}
        row = Row(tokens, context, blocks, slot)
        got = model.run(phase, build_batch([row], 4, pad_tokens=3, pad_rows=2))
        want = toy.logits(PROMPT[: context + len(tokens)])[-1:]
        np.testing.assert_allclose(got, want, atol=LIMIT)
        for name, state in model.states.items():
            untouched = [i for i in range(len(state)) if i not in used[name]]
            np.testing.assert_array_equal(state[untouched], before[name][untouched])


def test_an_inactive_row_between_active_ones(engine: Engine, toy: Toy) -> None:
    rows = [Row(PROMPT[:4], 0, [0], 0), Row([9, 9], 0, [1], -1), Row(PROMPT[:5], 0, [2, 3], 2)]
    batch = build_batch(rows, 4)
    batch["slot_mapping"][4:6] = -1
    got = engine.model.run("prefill", batch)
    np.testing.assert_allclose(got[0], toy.logits(PROMPT[:4])[-1], atol=LIMIT)
    np.testing.assert_allclose(got[2], toy.logits(PROMPT[:5])[-1], atol=LIMIT)
    assert not engine.model.states["kda_state_0"][1].any()
    assert not engine.model.states["latent_cache_1"][1].any()


def test_events_tell_what_happened(engine: Engine, toy: Toy) -> None:
    first, second = engine.add(PROMPT, 2), engine.add(OTHERS[0], 1)
    assert engine.step() == []  # 8 of 11 prompt tokens
    events = engine.step()
    assert [e.sequence_id for e in events] == [first, second]
    assert [e.finish_reason for e in events] == [None, "length"]
    (event,) = engine.step()
    assert (event.token, event.finish_reason) == (toy.greedy(PROMPT, 2)[1], "length")
    assert engine.step() == []


def test_stop_tokens(engine: Engine, toy: Toy) -> None:
    want = toy.greedy(PROMPT, 20)
    stop = want[5]
    end = want.index(stop) + 1
    sequence = engine.add(PROMPT, 20, stop_ids=[stop])
    finish(engine)
    assert engine.tokens(sequence) == want[:end]
    assert engine.finish_reason(sequence) == "stop"
    assert engine.free_slots == engine.model.capacity.slots  # given back before free()


def test_a_draw_depends_on_its_own_seed_alone(engine: Engine) -> None:
    options = SamplingOptions(temperature=2.0, top_k=20, seed=3)
    alone = list(engine.generate(PROMPT, 8, options))
    sequence = engine.add(PROMPT, 8, options)
    engine.add(OTHERS[1], 8, SamplingOptions(temperature=2.0, seed=4))
    finish(engine)
    assert engine.tokens(sequence) == alone
    assert alone != list(engine.generate(PROMPT, 8, SamplingOptions(2.0, 20, seed=9)))


def test_a_full_context_still_gives_a_token(engine: Engine, toy: Toy) -> None:
    longest = [i % toy.vocab for i in range(engine.model.capacity.max_context)]
    assert list(engine.generate(longest)) == toy.greedy(longest, 1)
    assert len(list(engine.generate(longest[:-3]))) == 4


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, 31], {}, "token 31 at position 1 is not within 0..30"),
        ([-1], {}, "token -1 at position 0"),
        ([2**40], {}, "not within"),
        ([1, 10**23], {}, "at position 1 is not within"),
        ([1.5], {}, "list of integers"),
        (["a"], {}, "list of integers"),
        ([[1, 2]], {}, "list of integers"),
        ([[1], [1, 2]], {}, "list of integers"),
        ([1] * 33, {}, "33 tokens, the longest sequence is 32"),
        ([1] * 32, {"max_new_tokens": 2}, "32 prompt tokens and 2 new"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens 0"),
        ([1], {"sequence_id": 7}, "sequence 7 exists already"),
    ],
)
def test_a_bad_request_harms_no_other(
    engine: Engine, toy: Toy, prompt: list, options: dict, message: str
) -> None:
    running = engine.add(PROMPT, 5, sequence_id=7)
    engine.step()
    room = (engine.free_blocks, engine.free_slots)
    with pytest.raises(RunError, match=message) as caught:
        engine.add(prompt, **options)
    assert caught.value.remedy
    assert (engine.free_blocks, engine.free_slots) == room
    finish(engine)
    assert engine.tokens(running) == toy.greedy(PROMPT, 5)


def test_out_of_blocks_harms_no_other(open_engine: Callable[..., Engine], toy: Toy) -> None:
    engine = open_engine(blocks=5)
    running = engine.add(PROMPT, 5)  # 15 rows: 4 blocks
    with pytest.raises(RunError, match="2 cache blocks needed, 1 free of 5") as caught:
        engine.add([1, 2, 3], 3)
    assert "free a sequence" in caught.value.remedy
    with pytest.raises(RunError, match="cache blocks needed"):
        engine.logits(PROMPT)
    small = engine.add([1, 2, 3], 2)
    finish(engine)
    assert engine.tokens(running) == toy.greedy(PROMPT, 5)
    assert engine.tokens(small) == toy.greedy([1, 2, 3], 2)
    assert list(engine.generate([1, 2, 3], 3)) == toy.greedy([1, 2, 3], 3)


def test_out_of_slots_takes_no_blocks(engine: Engine) -> None:
    ids = [engine.add([1], 2) for _ in range(3)]
    room = engine.free_blocks
    with pytest.raises(RunError, match="1 state slots needed, 0 free of 3"):
        engine.add([1], 2)
    assert engine.free_blocks == room
    engine.free(ids[1])
    engine.add([1], 2)


def test_unknown_ids(engine: Engine) -> None:
    for call in (engine.free, engine.tokens, engine.finish_reason):
        with pytest.raises(RunError, match="no sequence 99"):
            call(99)
    sequence = engine.add([1], 1)
    engine.free(sequence)
    with pytest.raises(RunError, match=f"no sequence {sequence}"):
        engine.free(sequence)


def test_own_and_fresh_ids_do_not_collide(engine: Engine) -> None:
    assert engine.add([1], 1, sequence_id=0) == 0
    assert engine.add([1], 1) == 1


def test_a_failing_graph_ends_only_its_call(
    engine: Engine, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine.add(OTHERS[0], 6)
    engine.step()
    original = engine.model.run

    def fail_prefill(phase: str, batch: dict) -> np.ndarray:
        if phase == "prefill":
            raise RunError("the prefill graph failed: boom", "again")
        return original(phase, batch)

    monkeypatch.setattr(engine.model, "run", fail_prefill)
    failed = engine.add(PROMPT, 3)
    events = engine.step()
    assert [(e.sequence_id, e.finish_reason) for e in events] == [
        (failed, "error"),
        (running, None),
    ]
    assert "boom" in str(events[0].error)
    with pytest.raises(RunError, match="boom"):
        list(engine.generate(PROMPT, 3))
    finish(engine)
    assert engine.tokens(running) == toy.greedy(OTHERS[0], 6)
    assert engine.finish_reason(failed) == "error"
    assert engine.free_slots == engine.model.capacity.slots


def test_nan_logits_end_only_their_sequence(
    engine: Engine, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine.model.run

    def poison(phase: str, batch: dict) -> np.ndarray:
        logits = original(phase, batch)
        if phase == "decode" and len(logits) == 2:
            logits[0] = np.nan
        return logits

    monkeypatch.setattr(engine.model, "run", poison)
    first, second = engine.add([4], 5), engine.add([5], 5)
    finish(engine)
    assert engine.finish_reason(first) == "error"
    assert engine.tokens(second) == toy.greedy([5], 5)


def test_arguments_out_of_range(engine: Engine, open_engine: Callable[..., Engine]) -> None:
    for options in ({"blocks": 0}, {"slots": -1}, {"max_context": 0}, {"threads": 0}):
        with pytest.raises(UsageError, match="give 1 or more"):
            open_engine(**options)
    with pytest.raises(UsageError, match="prefill_chunk 0"):
        Engine(engine.model, prefill_chunk=0)
    with pytest.raises(UsageError, match="prefill_chunk 0"):
        engine.logits(PROMPT, prefill_chunk=0)
    with pytest.raises(RunError, match="more rows than int32"):
        open_engine(blocks=1 << 30)


def test_leaving_the_context_frees_all(
    open_engine: Callable[..., Engine], toy_artifact: Path
) -> None:
    with open_engine() as engine:
        engine.add(PROMPT, 3)
    assert engine.active == ()
    assert engine.free_slots == engine.model.capacity.slots
