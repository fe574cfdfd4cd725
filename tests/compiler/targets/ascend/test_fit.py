"""A model that does not fit is told every reason, each once, with its places and what to do."""

from hybridge.compiler.targets.ascend.constraints import violations
from hybridge.compiler.targets.ascend.fit import DoesNotFitError


def test_every_reason_is_told_once_with_its_places():
    def broken(node, **facts):
        return violations(node, "LightningIndexer", "ascend-950", facts)

    prefill = [
        *broken("first", **{"head dimension": 16}),
        *broken("second", **{"head dimension": 16}),
    ]
    decode = [*broken("third", **{"head dimension": 16}), *broken("third", **{"key heads": 2})]
    error = DoesNotFitError("ascend-950", {"prefill": prefill, "decode_b1": decode})
    assert "for 2 reasons" in error.message
    assert error.message.count("head dimension is 16, must be 128") == 1
    assert "at prefill: first and 1 more; decode_b1: third" in error.message
    assert error.message.count("source: ") == 2
    assert "another checkpoint" in error.message
