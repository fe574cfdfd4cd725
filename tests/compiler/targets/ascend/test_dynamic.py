"""Open sizes: asked for by name, and never taken as numbers. Graphs that have them are in `test_model.py`."""

import pytest

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.targets.ascend.options import AscendOptions, parse_buckets
from hybridge.compiler.targets.ascend.symbolic_sizes import SymbolicSizes


def test_a_size_that_is_taken_as_a_number_is_an_error():
    sizes = SymbolicSizes()
    tokens, starts = sizes.shape(("tokens", "sequences + 1"))
    assert sizes.texts((3, tokens, starts)) == [3, "tokens", "sequences + 1"]
    sizes.require_open("lowering")
    int(tokens)
    with pytest.raises(CompileError, match=r"lowering: .*\n  Eq\(tokens, \d+\)"):
        sizes.require_open("lowering")


def test_buckets():
    found = parse_buckets("decode=dynamic/4,prefill=dynamic")
    assert found == {
        "dynamic": ("decode", "prefill"),
        "decode_sequences": (4,),
        "prefill_tokens": (),
    }
    options = AscendOptions("ascend-950", **found)
    assert {name: b.dynamic for name, b in options.buckets("decode").items()} == {
        "decode_b4": False,
        "decode_dynamic": True,
    }
    assert [b.dynamic for b in options.buckets("prefill").values()] == [True]
    with pytest.raises(UsageError, match="blocks=dynamic"):
        parse_buckets("blocks=dynamic")


def test_not_where_devices_share_experts():
    with pytest.raises(UsageError, match="at most 512"):
        AscendOptions("ascend-950", dynamic=("decode",), expert_parallel=2)
