"""Which options fit an Ascend target."""

import pytest

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.artifact import choose_options
from hybridge.compiler.targets.ascend.options import AscendOptions


def test_soc_and_block_size_are_the_callers():
    wanted = AscendOptions("ascend-a3", nz="off", block_size=32, convert=False)
    options = choose_options("ascend-950", 128, wanted)
    assert (options.soc, options.block_size, options.nz) == ("ascend-950", 128, "off")


def test_other_targets_have_no_options():
    assert choose_options("cpu", 64, None) is None
    with pytest.raises(UsageError, match="do not fit cpu"):
        choose_options("cpu", 64, AscendOptions("ascend-950"))


@pytest.mark.skipif(stand_in.find_wheel() is not None, reason="the torch-npu wheel is installed")
def test_a_missing_wheel_is_told_at_once():
    with pytest.raises(CompileError, match="torch-npu"):
        choose_options("ascend-950", 64, None)
