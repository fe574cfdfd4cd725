"""The emitted graphs, in onnxruntime with and without our library, equal the eager model."""

from __future__ import annotations

import torch

from hybridge.models.session import EagerSession


def tokens(*counts: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))
    return [
        torch.randint(0, 256, (count,), generator=generator).to(torch.int32) for count in counts
    ]


def assert_same_step(eager, session, new, phase="prefill", padding=0):
    expected = eager.step(new, phase, padding)
    torch.testing.assert_close(session.step(new, phase, padding), expected, rtol=1e-3, atol=1e-4)
    for name, cache in eager.caches.items():
        torch.testing.assert_close(session.caches[name], cache, rtol=1e-3, atol=1e-4)


def test_ragged_prefill_then_decode_equals_eager(emitted, session):
    eager = EagerSession(emitted.model, rows=3, max_context=40)
    assert_same_step(eager, session, tokens(9, 1, 17))
    assert_same_step(eager, session, tokens(0, 12, 3), padding=5)
    for _ in range(3):
        assert_same_step(eager, session, tokens(1, 1, 1), "decode")
    assert_same_step(eager, session, tokens(4, 0, 2))
