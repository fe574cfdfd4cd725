"""The eager model against the golden data, and its own invariants: chunks, ragged batches, padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from golden_data import EVERY, KIMI_K3, golden_model, golden_values
from hybridge.models.model import HybridModel
from hybridge.models.session import EagerSession, evaluate

# Stored as fp32, so an fp64 evaluation can differ by its rounding of logits up to 4: 2^-22.
FP64_TOLERANCE = 5e-7
# The figure that shared golden data states for fp32 on logits of magnitude 2.6.
FP32_TOLERANCE = 5e-4


def expected_logits(name: str) -> Tensor:
    values = golden_values(name)
    return values["logits"] if "logits" in values else values["logits_from_prefill_end"]


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, FP64_TOLERANCE), (torch.float32, FP32_TOLERANCE)]
)
def test_prefill_then_decode_gives_the_golden_logits(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    values, expected = golden_values(name), expected_logits(name)
    length = int(values["prefill_length"])
    logits = evaluate(golden_model(name, dtype), values["input_ids"], prefill_length=length)
    assert largest_difference(logits[-len(expected) :], expected) <= tolerance


@pytest.mark.parametrize("name", EVERY)
def test_greedy_tokens_are_the_golden_ones(name: str) -> None:
    values, expected = golden_values(name), expected_logits(name)
    logits = evaluate(golden_model(name), values["input_ids"])[-len(expected) :]
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", KIMI_K3)
def test_every_layer_tensor_is_the_golden_one(name: str) -> None:
    """States and caches after prefill and after all, and every sublayer's input and output."""
    model, values = golden_model(name, torch.float64), golden_values(name)
    ids, length = values["input_ids"], int(values["prefill_length"])
    session = EagerSession(model, max_context=len(ids), block_size=8)
    seen: dict[str, Tensor] = {}
    handles = [handle for i in range(model.config.num_layers) for handle in watch(model, i, seen)]
    session.step([ids[:length]])
    compare_layers(session, values, "prefill", seen)
    for token in ids[length:]:
        session.step([token.view(1)], "decode")
    compare_layers(session, values, "final", seen)
    for handle in handles:
        handle.remove()


def watch(
    model: HybridModel, index: int, seen: dict[str, Tensor]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Record one layer's sublayer inputs and outputs and its router's choice."""
    layer = model.model.layers[index]

    def record(name: str, module: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
        def hook(_module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[f"layer{index}.{name}_in"] = inputs[0]
            seen[f"layer{index}.{name}_out"] = output

        return module.register_forward_hook(hook)

    def route(_module: torch.nn.Module, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        ids, order = output[0].sort(-1)
        seen[f"layer{index}.router_experts"] = ids
        seen[f"layer{index}.router_weights"] = output[1].gather(-1, order)

    feed_forward = getattr(layer, "mlp", None) or layer.block_sparse_moe
    handles = [record("attn", layer.self_attn), record("ffn", feed_forward)]
    if hasattr(layer, "block_sparse_moe"):
        handles.append(layer.block_sparse_moe.gate.register_forward_hook(route))
    if hasattr(layer.self_attn, "indexer"):

        def choice(_module: torch.nn.Module, _inputs: object, output: Tensor) -> None:
            seen[f"layer{index}.topk"] = output

        handles.append(layer.self_attn.indexer.register_forward_hook(choice))
    return handles


def compare_layers(
    session: EagerSession, values: dict[str, Tensor], moment: str, seen: dict[str, Tensor]
) -> None:
    actual = dict(seen)
    length = session.lengths[0]
    for name, cache in session.caches.items():
        kind, layer = name.rsplit("_", 1)
        if kind in ("kda_state", "conv_state"):
            actual[f"layer{layer}.{kind}"] = cache[session.state_slot[0]]
        else:
            rows = cache[session.block_table[0].long()].flatten(0, 2)[:length]
            golden_name = {"indexer_cache": "indexer_key_cache"}.get(kind, kind)
            actual[f"layer{layer}.{golden_name}"] = rows
    for name, expected in values.items():
        prefix, _, rest = name.partition(".")
        if prefix != moment:
            continue
        if expected.dtype == torch.int32:
            assert torch.equal(actual[rest].to(torch.int32), expected), name
        else:
            torch.testing.assert_close(
                actual[rest].float(), expected, atol=2e-6, rtol=2e-6, msg=lambda m, n=name: n + m
            )


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
@settings(max_examples=6)
def test_chunked_prefill_in_any_split_equals_one_pass(name: str, data: st.DataObject) -> None:
    model = golden_model(name, torch.float64)
    ids = golden_values(name)["input_ids"][:24]
    session = EagerSession(model, max_context=len(ids), block_size=4)
    pieces, done = [], 0
    while done < len(ids):
        count = data.draw(st.integers(1, len(ids) - done))
        phase = "decode" if count == 1 and data.draw(st.booleans()) else "prefill"
        pieces.append(session.step([ids[done : done + count]], phase))
        done += count
    assert largest_difference(torch.cat(pieces), evaluate(model, ids)) <= 1e-10


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
@settings(max_examples=6)
def test_ragged_batches_equal_single_sequences(name: str, data: st.DataObject) -> None:
    """Rows of different lengths, some without tokens in a step, with padding behind them."""
    model = golden_model(name, torch.float64)
    ids = golden_values(name)["input_ids"]
    rows = data.draw(st.integers(1, 4))
    starts = [data.draw(st.integers(0, 9)) for _ in range(rows)]
    session = EagerSession(model, rows=rows, max_context=16, block_size=4)
    outputs: list[list[Tensor]] = [[] for _ in range(rows)]
    for _ in range(2):
        counts = [data.draw(st.integers(0, 6)) for _ in range(rows)]
        spans = [
            ids[start + length : start + length + count]
            for start, length, count in zip(starts, session.lengths, counts, strict=True)
        ]
        logits = session.step(spans, padding=data.draw(st.integers(sum(counts) == 0, 3)))
        for row, part in enumerate(logits.split(counts)):
            outputs[row].append(part)
    for row, start in enumerate(starts):
        length = session.lengths[row]
        if length:
            alone = evaluate(model, ids[start : start + length])
            assert largest_difference(torch.cat(outputs[row]), alone) <= 1e-10


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_inactive_rows_and_padding_change_no_cache_and_no_state(name: str, phase: str) -> None:
    model = golden_model(name)
    ids = golden_values(name)["input_ids"]
    session = EagerSession(model, rows=2, max_context=16, block_size=4)
    session.step([ids[:5], ids[:3]])
    before = {name: cache.clone() for name, cache in session.caches.items()}
    batch = session.batch([ids[:1], ids[:1]])
    batch["slot_mapping"] = torch.full((2,), -1, dtype=torch.int32)
    batch["state_slot"] = torch.full((2,), -1, dtype=torch.int32)
    model(phase, **batch, caches=session.caches)
    for cache_name, cache in session.caches.items():
        assert torch.equal(cache, before[cache_name]), f"{cache_name} changed"


def test_a_reused_state_slot_starts_from_zero() -> None:
    model = golden_model("kimi-k3.1-tiny")
    ids = golden_values("kimi-k3.1-tiny")["input_ids"]
    session = EagerSession(model, max_context=16, block_size=4)
    session.step([ids[20:31]])
    for cache in session.caches.values():
        cache.add_(7.0)
    session.lengths = [0]
    assert largest_difference(session.step([ids[:9]]), evaluate(model, ids[:9])) <= 1e-5
    session.lengths = [0]
    first = session.step([ids[:1]], "decode")
    assert largest_difference(first, evaluate(model, ids[:1])) <= 1e-5
