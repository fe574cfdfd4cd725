"""safetensors: what is written can be read by others, and nothing false is believed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.safetensors import (
    MAX_HEADER_BYTES,
    encode,
    read_header,
    read_tensors,
    write,
)


def raw(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    tensors = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.array([0x3F80], np.uint16),
        "empty": np.zeros((0, 4), np.int8),
        "scalar": np.array(7, np.int64),
    }
    write(file, tensors, {"made": "here"}, {"half": "bfloat16"})
    header = read_header(file)
    assert header.metadata == {"made": "here"}
    assert header.tensors["half"].dtype == "bfloat16"
    for name, array in read_tensors(file).items():
        assert array.dtype == tensors[name].dtype
        np.testing.assert_array_equal(array, tensors[name])
        assert not array.flags.writeable


def test_the_reference_package_agrees(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    array = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(safetensors.load(encode({"a": array}))["a"], array)
    safetensors.save_file({"b": array}, tmp_path / "theirs")
    np.testing.assert_array_equal(read_tensors(tmp_path / "theirs")["b"], array)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header of -1 bytes in a file of 0 bytes"),
        (b"\xff" * 7, "in a file of 7 bytes"),
        ((2**63).to_bytes(8, "little") + b"{}", "claims a header of"),
        (b"\x05" + bytes(7) + b"{}", "claims a header of 5 bytes"),
        (raw([1]), "no JSON object"),
        (raw({"a": ENTRY}, b"1234"), "the file at"),
        (raw({"a": ENTRY}, b"123456789"), "the file at"),
        (raw({"a": ENTRY | {"data_offsets": [0, 4]}}, b"1234"), "do not fit"),
        (raw({"a": ENTRY | {"data_offsets": [8, 0]}}, bytes(8)), "do not fit"),
        (raw({"a": ENTRY | {"shape": [2**62, 4]}}, bytes(8)), "do not fit"),
        (raw({"a": ENTRY | {"shape": [-2]}}, bytes(8)), "at least 0"),
        (raw({"a": ENTRY | {"dtype": "X9"}}, bytes(8)), "unknown dtype"),
        (raw({"a": ENTRY, "b": ENTRY}, bytes(8)), "hole or overlap"),
        (raw({"a": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)), "hole or overlap"),
        (raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "'data_offsets' is missing"),
        (raw({"__metadata__": {"a": 1}}), "strings"),
        (b"\x02" + bytes(7) + b"{x", "not valid JSON"),
    ],
)
def test_a_false_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_header(file)
    assert str(file) in caught.value.message
    assert caught.value.remedy


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}'
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"1")
    with pytest.raises(ArtifactError, match="twice"):
        read_header(tmp_path / "x")


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "huge"
    with file.open("wb") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER_BYTES * 2)  # sparse
    with pytest.raises(ArtifactError, match="claims a header"):
        read_header(file)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x", {"a": np.zeros(1, np.float32)})
    with pytest.raises(ArtifactError, match="no tensor 'b'"):
        read_tensors(tmp_path / "x", ["b"])
