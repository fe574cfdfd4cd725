"""The library as a whole: finding it, what it exports, its levels, and the interface it declares."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import hybridge.kernels
from hybridge.artifacts.errors import ArtifactError

from .harness import LEVELS, machine_levels, run

ABI_HEADER = Path(__file__).parents[2] / "kernels/abi/onnxruntime_abi.h"
SYSTEM_HEADERS = [
    Path("/usr/include/onnxruntime/onnxruntime_c_api.h"),
    Path("/usr/include/onnxruntime/core/session/onnxruntime_c_api.h"),
    Path("/usr/local/include/onnxruntime_c_api.h"),
]


def test_missing_library_is_an_artifact_error(monkeypatch, tmp_path):
    monkeypatch.setattr(hybridge.kernels, "__path__", [str(tmp_path)])
    monkeypatch.setenv(hybridge.kernels.LIBRARY_VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(ArtifactError, match=r"none\.so is no file\n  remedy: install the hybridge"):
        hybridge.kernels.library_path()
    monkeypatch.delenv(hybridge.kernels.LIBRARY_VARIABLE)
    with pytest.raises(ArtifactError, match=r"libhybridge_kernels\.so is not installed"):
        hybridge.kernels.library_path()


def test_a_file_that_is_no_library_is_an_artifact_error(monkeypatch, tmp_path):
    path = tmp_path / "text.so"
    path.write_bytes(b"not an ELF file")
    monkeypatch.setenv(hybridge.kernels.LIBRARY_VARIABLE, str(path))
    with pytest.raises(ArtifactError, match=r"onnxruntime cannot load the kernel library .*text"):
        hybridge.kernels.register(onnxruntime.SessionOptions())


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_only_the_entry_points_are_exported():
    command = ["nm", "-D", "--defined-only", str(hybridge.kernels.library_path())]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    exported = {line.split()[-1] for line in lines if line}
    assert exported == {"RegisterCustomOps", "hybridge_kernel_level"}


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_it_needs_no_libstdcxx():
    command = ["readelf", "-d", str(hybridge.kernels.library_path())]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "libstdc++" not in needed
    assert "libgomp" not in needed


def test_the_level_can_be_lowered(monkeypatch):
    function = ctypes.CDLL(str(hybridge.kernels.library_path())).hybridge_kernel_level
    function.restype = ctypes.c_char_p
    available = machine_levels()
    for level in LEVELS:
        monkeypatch.setenv("HYBRIDGE_KERNEL_LEVEL", level)
        assert function().decode() == (level if level in available else available[-1])


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("HYBRIDGE_KERNEL_LEVEL", "sse9")
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(Exception, match=r"no level is called 'sse9'; remedy: use plain, avx2"):
        run("Linear", {"x": ones, "weight": ones}, {"out": np.float32})


def declared_entries() -> dict[str, int]:
    text = ABI_HEADER.read_text()
    pattern = r"inline constexpr Entry<(\d+),.*?>\s*(\w+);"
    return {name: int(index) for index, name in re.findall(pattern, text, re.DOTALL)}


# Our names of OrtApi's members.
MEMBERS = {
    "create_status": "CreateStatus",
    "get_error_message": "GetErrorMessage",
    "create_custom_op_domain": "CreateCustomOpDomain",
    "custom_op_domain_add": "CustomOpDomain_Add",
    "add_custom_op_domain": "AddCustomOpDomain",
    "get_tensor_mutable_data": "GetTensorMutableData",
    "get_tensor_element_type": "GetTensorElementType",
    "get_dimensions_count": "GetDimensionsCount",
    "get_dimensions": "GetDimensions",
    "get_tensor_type_and_shape": "GetTensorTypeAndShape",
    "get_attribute_float": "KernelInfoGetAttribute_float",
    "get_attribute_int": "KernelInfoGetAttribute_int64",
    "get_attribute_string": "KernelInfoGetAttribute_string",
    "get_input_count": "KernelContext_GetInputCount",
    "get_input": "KernelContext_GetInput",
    "get_output": "KernelContext_GetOutput",
    "release_status": "ReleaseStatus",
    "release_tensor_info": "ReleaseTensorTypeAndShapeInfo",
    "release_custom_op_domain": "ReleaseCustomOpDomain",
    "parallel_for": "KernelContext_ParallelFor",
}


def test_every_declared_entry_has_its_member():
    assert set(declared_entries()) == set(MEMBERS)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_the_declared_interface_is_onnxruntimes(tmp_path):
    header = next((path for path in SYSTEM_HEADERS if path.is_file()), None)
    if header is None:
        pytest.skip("no onnxruntime header on this system (libonnxruntime-dev) to compare with")
    checks = [
        f"static_assert(offsetof(OrtApi, {MEMBERS[name]}) == {index} * sizeof(void*));"
        for name, index in declared_entries().items()
    ]
    fields = {"get_alias_map": "GetAliasMap", "create_kernel_v2": "CreateKernelV2"}
    checks += [
        f"static_assert(offsetof(OrtCustomOp, {theirs}) == offsetof(hybridge::abi::CustomOp, {ours}));"
        for ours, theirs in fields.items()
    ]
    source = tmp_path / "compare.cpp"
    includes = [f'#include "{header}"', f'#include "{ABI_HEADER}"', "#include <cstddef>"]
    source.write_text("\n".join(includes + checks))
    subprocess.run(["c++", "-std=c++17", "-fsyntax-only", str(source)], check=True)
