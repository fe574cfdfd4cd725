"""Which options fit an Ascend target, and how sizes are written."""

import pytest

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.artifact import choose_options, parse_buckets
from hybridge.compiler.targets.ascend.emit import AscendOptions


def test_soc_and_block_size_are_the_callers():
    wanted = AscendOptions("ascend-a3", nz="off", block_size=32, convert=False)
    options = choose_options("ascend-950", "none", 128, wanted)
    assert (options.soc, options.block_size, options.nz) == ("ascend-950", 128, "off")


def test_other_targets_have_no_options():
    assert choose_options("cpu", "copy", 64, None) is None
    with pytest.raises(UsageError, match="do not fit cpu"):
        choose_options("cpu", "none", 64, AscendOptions("ascend-950"))


def test_weight_bytes_are_refused():
    with pytest.raises(UsageError, match="plan of the weights"):
        choose_options("ascend-950", "reference", 64, None)


@pytest.mark.skipif(stand_in.find_wheel() is not None, reason="the torch-npu wheel is installed")
def test_a_missing_wheel_is_told_at_once():
    with pytest.raises(CompileError, match="torch-npu"):
        choose_options("ascend-950", "none", 64, None)


def test_buckets():
    assert parse_buckets("") == {}
    found = parse_buckets("decode=8, prefill=512,sequences=2")
    assert found == {"decode_sequences": 8, "prefill_tokens": 512, "prefill_sequences": 2}
    assert AscendOptions("ascend-950", **found).bucket("prefill").tokens == 512


@pytest.mark.parametrize("text", ["decode", "decode=", "decode=0", "tokens=4", "decode=-1"])
def test_other_words_are_refused(text):
    with pytest.raises(UsageError, match="cannot read"):
        parse_buckets(text)
