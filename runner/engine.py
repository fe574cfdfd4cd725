"""Serving sequences: prefill in chunks, decode in batches, and what each sequence holds.

A sequence reserves all the cache blocks it can need, and its state slot, when it is added. So one
that does not fit is refused before it runs, and one that runs never fails for want of room.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.errors import HybridgeError, RunError, UsageError
from hybridge.runner.batch import Indices, Row, build_batch
from hybridge.runner.blocks import FreeList
from hybridge.runner.model import Model
from hybridge.runner.sampling import Sampler, SamplingOptions

FinishReason = Literal["stop", "length", "error"]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_ROOM = "free a sequence, wait for one to finish, or load with more blocks or slots"


@dataclass(frozen=True)
class TokenEvent:
    """What happened to a sequence in a step.

    Attributes:
        sequence_id: which.
        token: its new token; None if it failed.
        finish_reason: "stop" (a stop token, which ``token`` is), "length", "error", or None while
            it goes on.
        error: what went wrong, when the reason is "error".
    """

    sequence_id: int
    token: int | None
    finish_reason: FinishReason | None = None
    error: HybridgeError | None = None


@dataclass(eq=False)
class _Sequence:
    """A sequence being served. ``cached`` tokens of ``tokens`` have been run."""

    sequence_id: int
    tokens: list[int]
    prompt_length: int
    limit: int
    stop_ids: frozenset[int]
    sampler: Sampler
    blocks: list[int]
    slot: int
    block_numbers: Indices
    cached: int = 0
    finish_reason: FinishReason | None = None
    error: HybridgeError | None = None

    @property
    def prefilling(self) -> bool:
        return self.finish_reason is None and self.cached < self.prompt_length

    @property
    def decoding(self) -> bool:
        return self.finish_reason is None and self.cached >= self.prompt_length

    def row(self, count: int) -> Row:
        new = self.tokens[self.cached : self.cached + count]
        return Row(new, self.cached, self.block_numbers, self.slot)


def _one_at_a_time(
    method: Callable[Concatenate[Engine, _P], _R],
) -> Callable[Concatenate[Engine, _P], _R]:
    """A method of the engine that waits while another thread is in one."""

    @functools.wraps(method)
    def waiting(self: Engine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return waiting


class Engine:
    """Serves sequences on a loaded model.

    Several threads may use an engine: one method runs at a time, and a step advances the sequences
    of all. A forked child must load its own.

    Args:
        model: the loaded model; an engine owns its caches.
        prefill_chunk: most prompt tokens in one call; default from the artifact.
    """

    def __init__(self, model: Model, prefill_chunk: int | None = None) -> None:
        self.model = model
        self._lock = threading.RLock()
        chunk = model.artifact.manifest.defaults.prefill_chunk
        self.prefill_chunk = _positive(
            "prefill_chunk", chunk if prefill_chunk is None else prefill_chunk
        )
        capacity = model.capacity
        self._blocks = FreeList("cache blocks", capacity.blocks, _NO_ROOM)
        self._slots = FreeList("state slots", capacity.slots, _NO_ROOM)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        for sequence_id in list(self._sequences):
            self.free(sequence_id)

    @property
    def free_blocks(self) -> int:
        """Cache blocks that no sequence holds."""
        return self._blocks.free

    @property
    def free_slots(self) -> int:
        """State slots that no sequence holds."""
        return self._slots.free

    @property
    @_one_at_a_time
    def active(self) -> tuple[int, ...]:
        """The sequences that are not finished, oldest first."""
        return tuple(s.sequence_id for s in self._sequences.values() if s.finish_reason is None)

    @_one_at_a_time
    def add(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop_ids: Sequence[int] | None = None,
        sequence_id: int | None = None,
    ) -> int:
        """Add a sequence; nothing is run yet.

        Args:
            prompt_ids: the prompt.
            max_new_tokens: stop after so many; default, when the context is full.
            sampling: how tokens are chosen; default greedy.
            stop_ids: tokens that end it; default the model's end-of-text tokens.
            sequence_id: an id of your own; default a fresh one.

        Returns:
            The sequence's id.

        Raises:
            RunError: a bad token id, too long, an id in use, or no room; other sequences are as
                they were.
        """
        if sequence_id is not None and sequence_id in self._sequences:
            raise RunError(f"sequence {sequence_id} exists already", "free it, or use another id")
        prompt = self._checked_prompt(prompt_ids)
        new = self._checked_length(len(prompt), max_new_tokens)
        chosen = self._fresh_id() if sequence_id is None else sequence_id
        stops = self.model.artifact.manifest.special_tokens.eos if stop_ids is None else stop_ids
        # The last token is chosen, but never run: it needs no row in the caches.
        sequence = self._reserve(chosen, prompt, len(prompt) + new - 1)
        sequence.limit = len(prompt) + new
        sequence.stop_ids = frozenset(stops)
        sequence.sampler = Sampler(sampling or SamplingOptions())
        self._sequences[chosen] = sequence
        return chosen

    @_one_at_a_time
    def step(self) -> list[TokenEvent]:
        """Run one chunk of prefill if any sequence waits for it, then one token of all the others.

        Returns:
            What happened, in the order of adding; a failure ends only the sequences of its call.
        """
        decoding = [s for s in self._sequences.values() if s.decoding]
        events = self._prefill() if any(s.prefilling for s in self._sequences.values()) else []
        if decoding:
            events += self._advance("decode", decoding, [1] * len(decoding))
        return events

    @_one_at_a_time
    def tokens(self, sequence_id: int) -> list[int]:
        """The tokens that a sequence has generated so far."""
        sequence = self._get(sequence_id)
        return sequence.tokens[sequence.prompt_length :]

    @_one_at_a_time
    def finish_reason(self, sequence_id: int) -> FinishReason | None:
        """Why a sequence ended, or None while it goes on."""
        return self._get(sequence_id).finish_reason

    @_one_at_a_time
    def free(self, sequence_id: int) -> None:
        """Forget a sequence, finished or not.

        Raises:
            RunError: no such sequence.
        """
        self._release(self._get(sequence_id))
        del self._sequences[sequence_id]

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int | None = None,
        sampling: SamplingOptions | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Generate from one prompt, token by token; a stop token is the last one yielded.

        Other sequences of the engine advance as well; read them with `tokens`.

        Raises:
            RunError: as `add` (at once), or the sequence failed.
        """
        sequence_id = self.add(prompt_ids, max_new_tokens, sampling, stop_ids)
        return self._stream(sequence_id)

    def _stream(self, sequence_id: int) -> Iterator[int]:
        given = 0
        try:
            while True:
                new, finish_reason, error = self._since(sequence_id, given)
                given += len(new)
                yield from new
                if error is not None:
                    raise error
                if finish_reason is not None:
                    return
                self.step()
        finally:
            self._forget(sequence_id)

    @_one_at_a_time
    def _since(
        self, sequence_id: int, given: int
    ) -> tuple[list[int], FinishReason | None, HybridgeError | None]:
        """The tokens past the first `given`, and how the sequence stands after them."""
        sequence = self._get(sequence_id)
        new = sequence.tokens[sequence.prompt_length + given :]
        return new, sequence.finish_reason, sequence.error

    @_one_at_a_time
    def _forget(self, sequence_id: int) -> None:
        if sequence_id in self._sequences:
            self.free(sequence_id)

    @_one_at_a_time
    def logits(
        self,
        prompt_ids: Sequence[int],
        prefill_chunk: int | None = None,
        decode_from: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """The logits of every position of a prompt, for evaluation; other sequences do not move.

        Args:
            prompt_ids: [T] token ids.
            prefill_chunk: tokens in one prefill call; default the engine's.
            decode_from: run the tokens from this position on one by one through the decode graph.

        Returns:
            [T, vocab] fp32.

        Raises:
            RunError: a bad token id, too long, or no room.
        """
        prompt = self._checked_prompt(prompt_ids)
        chunk = self.prefill_chunk if prefill_chunk is None else prefill_chunk
        _positive("prefill_chunk", chunk)
        total = len(prompt)
        switch = total if decode_from is None else min(max(decode_from, 0), total)
        result = np.empty((total, self.model.vocab_size), np.float32)
        sequence = self._reserve(-1, prompt, total)
        try:
            while sequence.cached < total:
                decode = sequence.cached >= switch
                count = 1 if decode else min(chunk, switch - sequence.cached)
                batch = build_batch(
                    [sequence.row(count)],
                    self.model.capacity.block_size,
                    logits_index=range(count),
                )
                rows = self.model.run("decode" if decode else "prefill", batch)
                result[sequence.cached : sequence.cached + count] = rows
                sequence.cached += count
        finally:
            self._release(sequence)
        return result

    def _prefill(self) -> list[TokenEvent]:
        """One call: prompt tokens of the oldest waiting sequences, up to the chunk size."""
        room = self.prefill_chunk
        chosen: list[_Sequence] = []
        counts: list[int] = []
        for sequence in self._sequences.values():
            if sequence.prefilling and room > 0:
                count = min(room, sequence.prompt_length - sequence.cached)
                chosen.append(sequence)
                counts.append(count)
                room -= count
        return self._advance("prefill", chosen, counts)

    def _advance(
        self, phase: str, sequences: list[_Sequence], counts: list[int]
    ) -> list[TokenEvent]:
        rows = [s.row(count) for s, count in zip(sequences, counts, strict=True)]
        try:
            logits = self.model.run(phase, build_batch(rows, self.model.capacity.block_size))
        except RunError as error:
            return [self._fail(sequence, error) for sequence in sequences]
        events = []
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            sequence.cached += count
            if sequence.cached == len(sequence.tokens):
                events.append(self._choose(sequence, logits[index]))
        return events

    def _choose(self, sequence: _Sequence, logits: npt.NDArray[np.float32]) -> TokenEvent:
        try:
            token = sequence.sampler.choose(logits)
        except RunError as error:
            return self._fail(sequence, error)
        sequence.tokens.append(token)
        if token in sequence.stop_ids:
            self._finish(sequence, "stop")
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, "length")
        return TokenEvent(sequence.sequence_id, token, sequence.finish_reason)

    def _fail(self, sequence: _Sequence, error: HybridgeError) -> TokenEvent:
        self._finish(sequence, "error")
        sequence.error = error
        return TokenEvent(sequence.sequence_id, None, "error", error)

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._release(sequence)

    def _reserve(self, sequence_id: int, prompt: list[int], cached_tokens: int) -> _Sequence:
        """Take a slot and blocks for so many cached tokens: both, or neither."""
        blocks = self._blocks.take(max(1, -(-cached_tokens // self.model.capacity.block_size)))
        try:
            slot = self._slots.take(1)[0]
        except RunError:
            self._blocks.give_back(blocks)
            raise
        return _Sequence(
            sequence_id=sequence_id,
            tokens=prompt,
            prompt_length=len(prompt),
            limit=len(prompt),
            stop_ids=frozenset(),
            sampler=Sampler(SamplingOptions()),
            blocks=blocks,
            slot=slot,
            block_numbers=np.array(blocks, np.int32),
        )

    def _release(self, sequence: _Sequence) -> None:
        """Give back what a sequence holds; once only."""
        if sequence.slot >= 0:
            self._blocks.give_back(sequence.blocks)
            self._slots.give_back([sequence.slot])
        sequence.blocks, sequence.slot = [], -1

    def _get(self, sequence_id: int) -> _Sequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise RunError(
                f"there is no sequence {sequence_id}", "use an id that add() gave and not freed yet"
            )
        return sequence

    def _fresh_id(self) -> int:
        while self._next_id in self._sequences:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _checked_prompt(self, prompt_ids: Sequence[int]) -> list[int]:
        try:
            prompt = np.asarray(prompt_ids)
        except ValueError as error:  # lists of several lengths
            raise RunError(f"a prompt is a list of integers: {error}", "give token ids") from error
        if prompt.size == 0:
            raise RunError("the prompt is empty", "give at least one token")
        if prompt.ndim != 1 or not _holds_integers(prompt):
            raise RunError(
                f"a prompt is a list of integers, not {prompt.dtype} of shape {list(prompt.shape)}",
                "give token ids",
            )
        vocabulary = self.model.vocab_size
        bad = np.flatnonzero((prompt < 0) | (prompt >= vocabulary))
        if bad.size:
            raise RunError(
                f"token {prompt[bad[0]]} at position {bad[0]} is not within 0..{vocabulary - 1}",
                "use the tokenizer of this very checkpoint",
            )
        if prompt.size > self.model.capacity.max_context:
            raise RunError(
                f"the prompt has {prompt.size} tokens, the longest sequence is "
                f"{self.model.capacity.max_context}",
                "shorten it, or load with a larger max_context",
            )
        return [int(token) for token in prompt]

    def _checked_length(self, prompt_length: int, max_new_tokens: int | None) -> int:
        """How many tokens may be generated."""
        longest = self.model.capacity.max_context
        # The very last token takes no room, so a full prompt still gives one.
        room = longest - prompt_length + 1
        new = room if max_new_tokens is None else max_new_tokens
        if new < 1:
            raise RunError(f"max_new_tokens {new}", "ask for at least one token")
        if new > room:
            raise RunError(
                f"{prompt_length} prompt tokens and {new} new ones are more than the longest "
                f"sequence of {longest}",
                f"ask for at most {room} new tokens, or load with a larger max_context",
            )
        return new


def _holds_integers(values: npt.NDArray[Any]) -> bool:
    """Whether an array holds integers; numpy keeps those past 64 bits as objects."""
    if values.dtype.kind == "O":
        return all(isinstance(value, int) for value in values)
    return values.dtype.kind in "iu"


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"{name} {value}", "give 1 or more")
    return value
