"""The traced graph: its signature, its sizes, and its values against the eager model."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from golden_data import EVERY, golden_model, golden_values
from hybridge.compiler.trace import BATCH_INPUTS, TracedPhase, trace
from hybridge.models.batch import PHASES, Phase
from hybridge.models.caches import cache_shapes
from hybridge.models.session import EagerSession

traced_phase = cache(trace)


def run_graph(traced: TracedPhase, weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    """Interpret a traced graph on real values, by placeholder name."""
    names = [node.target for node in traced.graph_module.graph.nodes if node.op == "placeholder"]
    values = [
        weights[traced.weights[name]] if name in traced.weights else inputs[name] for name in names
    ]
    result = torch.fx.Interpreter(traced.graph_module).run(*values, enable_io_processing=False)
    logits: Tensor = result[0] if isinstance(result, tuple | list) else result
    return logits


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("phase", PHASES)
def test_inputs_are_the_graph_signature(name: str, phase: Phase) -> None:
    config = golden_model(name).config
    traced = traced_phase(config, phase, block_size=8)
    caches = tuple(cache.name for cache in cache_shapes(config))
    assert traced.inputs == (*BATCH_INPUTS, *caches)
    placeholders = [n.target for n in traced.graph_module.graph.nodes if n.op == "placeholder"]
    assert [name for name in placeholders if name not in traced.weights] == list(traced.inputs)
    parameters = dict(golden_model(name).named_parameters())
    assert sorted(traced.weights.values()) == sorted(parameters)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("phase", PHASES)
def test_the_graph_computes_what_the_model_computes(name: str, phase: Phase) -> None:
    """At other sizes than the example's, with rows of different lengths, caches written alike."""
    model, ids = golden_model(name), golden_values(name)["input_ids"]
    traced = traced_phase(model.config, phase, block_size=8)
    session = EagerSession(model, rows=2, max_context=32, block_size=8)
    session.step([ids[:13], ids[:6]])
    new = [ids[13:14], ids[6:7]] if phase == "decode" else [ids[13:20], ids[6:7]]
    batch = session.batch(new)
    caches = {name: cache.clone() for name, cache in session.caches.items()}
    logits = run_graph(traced, dict(model.named_parameters()), {**batch, **caches})
    torch.testing.assert_close(logits, session.step(new, phase), atol=1e-5, rtol=1e-5)
    for cache_name, expected in session.caches.items():
        torch.testing.assert_close(caches[cache_name], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("phase", PHASES)
def test_one_graph_serves_every_size_from_one_up(phase: Phase) -> None:
    """cases row 13: sizes equal to a Dim's minimum trace and run (pytorch 176349)."""
    model = golden_model("kimi-k3.1-tiny")
    traced = trace(model.config, phase, block_size=4)
    ids = golden_values("kimi-k3.1-tiny")["input_ids"]
    for count in (1,) if phase == "decode" else (1, 2, 5):
        session = EagerSession(model, max_context=4, block_size=4)
        if count > 4:
            session = EagerSession(model, max_context=8, block_size=4)
        batch = session.batch([ids[:count]])
        weights = dict(model.named_parameters())
        logits = run_graph(traced, weights, {**batch, **session.caches})
        assert logits.shape == (count, model.config.vocab_size)
        assert logits.isfinite().all()


def test_no_weight_has_bytes() -> None:
    traced = trace(golden_model("kimi-k3-tiny").config, "decode", block_size=8)
    assert all(type(value).__name__ == "FakeTensor" for value in traced.program.state_dict.values())
