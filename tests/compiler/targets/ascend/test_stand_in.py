"""The stand-in answers only what it can know, and refuses everything else by name."""

import os
import signal
import sys

import pytest

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.targets.ascend import stand_in

needs_wheel = pytest.mark.skipif(
    stand_in.find_wheel() is None,
    reason="needs the torch-npu wheel: pip install --no-deps torch-npu==2.13.0",
)


def test_cann_versions_compare_as_releases_do():
    order = ["8.2.RC1", "8.2.0", "8.5.0.alpha003", "8.5.0.beta1", "8.5.0.RC2", "8.5.0", "9.0.0"]
    parsed = [stand_in.parse_cann_version(text) for text in order]
    assert parsed == sorted(parsed)
    assert len(set(parsed)) == len(parsed)


@pytest.mark.parametrize("text", ["", "9", "latest", "9.0.0-1", "9.0.0.rc", "v9.0.0"])
def test_other_words_are_no_version(text):
    with pytest.raises(UsageError, match="is not a CANN version"):
        stand_in.parse_cann_version(text)


@pytest.mark.skipif(stand_in.find_wheel() is not None, reason="the torch-npu wheel is installed")
def test_a_missing_wheel_is_told_with_the_command_that_installs_it():
    with pytest.raises(CompileError, match="torch-npu wheel carries") as raised:
        stand_in.require_wheel()
    assert "pip install --no-deps torch-npu==" in raised.value.remedy


@needs_wheel
def test_whatever_needs_a_device_is_refused_by_name():
    stand_in.install("9.0.0", "Ascend950PR_9599")
    core = sys.modules["torchair.core._torchair"]
    for name, use in {
        "torchair.core._torchair.AclnnLaunch": lambda: core.AclnnLaunch,
        "TorchNpuGraph.compile": lambda: core.TorchNpuGraphBase("g").compile(),
        "TorchNpuGraph.run": lambda: core.TorchNpuGraphBase("g").run(),
    }.items():
        with pytest.raises(stand_in.NeedsDeviceError, match=name):
            use()


@needs_wheel
def test_questions_to_the_operator_library_are_kept():
    installed = stand_in.install("9.0.0", "Ascend950PR_9599")
    core = sys.modules["torchair.core._torchair"]
    assert core.CheckAclnnAvaliable("aclnnSomething")
    assert core.get_registered_ir_def("NoSuchOperator")[0] == "ERROR"
    assert installed.unverified == ["CANN 9.0.0 has aclnnSomething"]
    stand_in.install("9.0.0", "Ascend950PR_9599")
    assert installed.unverified == []


@needs_wheel
def test_installing_leaves_the_process_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    stand_in.install("9.0.0", "Ascend910_9391")
    assert signal.getsignal(signal.SIGINT) is before
    assert "torch_npu" not in sys.modules
    assert os.environ[stand_in.AUTOLOAD_SWITCH] == "0"
