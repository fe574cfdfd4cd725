"""What compiling was asked to do, and what it has produced so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from hybridge.compiler.pipeline import PipelineReport
from hybridge.compiler.trace import TracedPhase
from hybridge.compiler.weights import WeightsPolicy
from hybridge.models.batch import PHASES, Phase

Activations = Literal["float32", "bfloat16"]
ACTIVATIONS: tuple[Activations, ...] = ("float32", "bfloat16")


@dataclass(frozen=True)
class CompileOptions:
    """What the caller may choose; everything here is part of an artifact's identity.

    Args:
        target: "cpu".
        phases: which graphs to emit.
        passes: names of the passes to run, in the pipeline's order; None runs all.
        weights: "reference", "copy", "packed" or "none".
        block_size: tokens in a block of the paged caches.
        activations: "bfloat16" lets matrix products with bf16, packed or MXFP4 weights round their activations
            to bf16, which is up to twice as fast for many tokens, and keeps paged caches in bf16; "float32" rounds
            nothing.
        dumps: keep the graph after every pass in the artifact.
        check_passes: run the graph on real values after every pass and record the largest change.
        golden: record what the eager model computes, for `verify`; where there are weights and they fit in memory.
    """

    target: str = "cpu"
    phases: tuple[Phase, ...] = PHASES
    passes: tuple[str, ...] | None = None
    weights: WeightsPolicy = "reference"
    block_size: int = 64
    activations: Activations = "float32"
    dumps: bool = False
    check_passes: bool = False
    golden: bool = True


@dataclass
class Build:
    """The phases on their way through the compiler, and how long each step took."""

    traced: dict[Phase, TracedPhase] = field(default_factory=dict)
    reports: dict[Phase, PipelineReport] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Record under `step` how long the block took."""
        start = time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start
