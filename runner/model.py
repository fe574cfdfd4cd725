"""A loaded model: sessions and states, with no notion of sequences yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridge.artifacts.artifact import Artifact
from hybridge.artifacts.errors import RunError, UsageError
from hybridge.artifacts.manifest import Defaults
from hybridge.runner.sessions import PhaseSession, SessionSettings, WeightValues
from hybridge.runner.states import allocate_states


@dataclass(frozen=True)
class Capacity:
    """How much a loaded model can hold.

    Attributes:
        blocks: cache blocks, for all sequences together.
        block_size: tokens in a block; fixed by the artifact.
        slots: sequences at a time.
        max_context: tokens of the longest sequence.
    """

    blocks: int
    block_size: int
    slots: int
    max_context: int

    @staticmethod
    def from_defaults(
        defaults: Defaults, blocks: int | None, slots: int | None, max_context: int | None
    ) -> Capacity:
        """The artifact's defaults, where the caller says nothing; blocks for all slots in full.

        Raises:
            UsageError: a number below 1.
        """
        given = {"blocks": blocks, "slots": slots, "max_context": max_context}
        for name, value in given.items():
            if value is not None and value < 1:
                raise UsageError(f"{name} {value}", "give 1 or more")
        context = max_context or defaults.max_context
        places = slots or defaults.slots
        full = -(-context // defaults.block_size) * places
        return Capacity(blocks or full, defaults.block_size, places, context)


class Model:
    """The sessions of an artifact over one set of weights and states.

    Attributes:
        artifact: what it was loaded from.
        capacity: blocks, slots and context.
        states: memory of every cache and state, by name; changed in place by every call.
        native: whether the kernel library is used.
    """

    def __init__(self, artifact: Artifact, capacity: Capacity, settings: SessionSettings) -> None:
        self.artifact = artifact
        self.capacity = capacity
        self.native = settings.native
        self.states: dict[str, npt.NDArray[Any]] = allocate_states(
            artifact.manifest.states,
            blocks=capacity.blocks,
            block_size=capacity.block_size,
            slots=capacity.slots,
        )
        self._weights = WeightValues(artifact)
        self.sessions = {
            phase: PhaseSession(artifact, phase, self._weights, self.states, settings)
            for phase in artifact.manifest.phases
        }

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.artifact.manifest.model.vocab_size

    @property
    def weight_copies(self) -> frozenset[str]:
        """Weights that could not be used where they are mapped, and were copied."""
        return frozenset(self._weights.copied)

    def run(
        self, phase: str, batch: Mapping[str, npt.NDArray[np.int32]]
    ) -> npt.NDArray[np.float32]:
        """Run one phase; a prefill graph also serves for an absent decode graph.

        Args:
            phase: "prefill" or "decode".
            batch: index inputs by name (`hybridge.runner.batch.build_batch`).

        Returns:
            Logits [L, vocab]; the memory is written again by the phase's next call.

        Raises:
            RunError: the artifact has no such graph, or the graph failed.
        """
        session = self.sessions.get(phase) or self.sessions.get("prefill")
        if session is None:
            raise RunError(
                f"the artifact has no {phase} graph, only {', '.join(self.sessions)}",
                "compile it again without --phase",
            )
        return session.run(batch, self.vocab_size)
