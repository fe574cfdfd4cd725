"""Where the time of a step goes: onnxruntime's own profile of the runner's sessions."""

from __future__ import annotations

import collections
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime

from hybridge.runner.model import Model

_WARM = 2


@dataclass(frozen=True)
class StepProfile:
    """Times of a step in milliseconds, means over the steps: only means of parts add up.

    Args:
        step: from the call into the runner to its return.
        ops: operator -> time inside its kernels, all its nodes together.
    """

    step: float
    ops: dict[str, float]

    @property
    def outside(self) -> float:
        """Time of a step outside of every kernel: the runner's, onnxruntime's, Python's."""
        return self.step - sum(self.ops.values())


@contextlib.contextmanager
def profiling() -> Iterator[None]:
    """Sessions made within write a profile."""
    folder = tempfile.mkdtemp(prefix="hybridge-profile-")
    make = onnxruntime.InferenceSession

    def session(graph: Any, options: Any, *rest: Any, **named: Any) -> Any:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        return make(graph, options, *rest, **named)

    with mock.patch.object(onnxruntime, "InferenceSession", session):
        yield


def profile(model: Model, phase: str, step: Callable[[], object], repeats: int) -> StepProfile:
    """Run a step of a model that was loaded under `profiling`; its session's profile ends here."""
    for _ in range(_WARM):
        step()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    each = (time.perf_counter() - start) * 1000 / repeats
    events = json.loads(Path(model.sessions[phase]._session.end_profiling()).read_text())
    return StepProfile(each, _per_operator(events, repeats))


def _per_operator(events: list[dict[str, Any]], repeats: int) -> dict[str, float]:
    runs = [event for event in events if event["name"] == "model_run"]
    begin = runs[_WARM]["ts"]
    found: dict[str, float] = collections.defaultdict(float)
    for event in events:
        inside = event.get("cat") == "Node" and event["name"].endswith("kernel_time")
        if inside and event["ts"] >= begin:
            found[event["args"]["op_name"]] += event["dur"] / 1000 / repeats
    return dict(found)
