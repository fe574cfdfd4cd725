"""Headers are checked before they are believed: each fault has its refusal, any bytes have one."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from golden_data import FOLDER as GOLDEN
from hybridge.artifacts.errors import CheckpointError
from hybridge.models.safetensors_file import read_header


def entry(begin: int, end: int, shape: list | None = None, dtype: str = "F32") -> dict:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(folder, header: object, data: bytes = bytes(16), length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return file


def test_regions_point_at_the_bytes(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.uint8)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    regions = read_header(tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    assert (regions["a"].dtype, regions["a"].shape) == ("F32", (2, 3))
    for name, tensor in tensors.items():
        region = regions[name]
        held = content[region.offset : region.offset + region.length]
        assert held == tensor.numpy().tobytes()


def test_empty_tensors_and_scalars(tmp_path):
    save_file({"e": torch.empty(0, 4), "s": torch.tensor(2.0)}, tmp_path / "x.safetensors")
    regions = read_header(tmp_path / "x.safetensors")
    assert (regions["e"].length, regions["s"].shape) == (0, ())


FAULTS = [
    ({"a": entry(0, 16), "b": entry(8, 16)}, "overlaps the one before"),
    ({"a": entry(0, 8), "b": entry(12, 16)}, "leaves a hole before it"),
    ({"a": entry(4, 16)}, "leaves a hole before it"),
    ({"a": entry(0, 12)}, "4 bytes belong to no tensor"),
    ({"a": entry(0, 20)}, "outside the 16 bytes of data"),
    ({"a": entry(16, 0, [0])}, "lies at [16, 0)"),
    ({"a": entry(-4, 12, [4])}, "no lists of non-negative integers"),
    ({"a": entry(0, 16, [5])}, "cannot have 16 bytes"),
    ({"a": entry(0, 16, [2**62, 4])}, "cannot have 16 bytes"),
    ({"a": entry(0, 16, [2**64])}, "no lists of non-negative integers"),
    ({"a": entry(0, 16, [1] * 1000)}, "no lists of non-negative integers"),
    ({"a": entry(0, 16, [4.0])}, "no lists of non-negative integers"),
    ({"a": entry(0, 16, [True, 4])}, "no lists of non-negative integers"),
    ({"a": entry(0, 16, dtype="F31")}, "unknown dtype 'F31'"),
    ({"a": {"dtype": "F32", "shape": [4]}}, "has no entry of dtype, shape and data_offsets"),
    ({"a": 5}, "has no entry of dtype, shape and data_offsets"),
    ([], "header is not a JSON object"),
    (b"{", "header is not valid JSON"),
    (b"\xff\xff", "header is not valid JSON"),
    (b'{"a": 1, "a": 2}', "a name is given twice"),
    (b"[" * 100_000, "header is not valid JSON"),
]


@pytest.mark.parametrize(("header", "text"), FAULTS, ids=[text for _, text in FAULTS])
def test_faults(header, text, tmp_path):
    file = write(tmp_path, header)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert str(file) in caught.value.message
    assert text in caught.value.message
    assert "fetch it again" in caught.value.remedy


@pytest.mark.parametrize("length", [1 << 63, 200_000_000, 100])
def test_header_length_beyond_the_file(length, tmp_path):
    file = write(tmp_path, {}, b"", length)
    with pytest.raises(CheckpointError, match=f"states a header of {length} bytes"):
        read_header(file)


def test_short_and_missing_files(tmp_path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(file)
    file.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="has only 3 bytes"):
        read_header(file)


@given(data=st.data())
def test_any_changed_header_byte_is_refused_or_read(data, tmp_path_factory):
    content = bytearray((GOLDEN / "kimi-linear-tiny" / "golden.safetensors").read_bytes())
    length = struct.unpack("<Q", content[:8])[0]
    content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    file.write_bytes(content)
    try:
        regions = read_header(file)
    except CheckpointError:
        return
    assert all(r.offset + r.length <= len(content) for r in regions.values())


@given(content=st.binary(max_size=200))
def test_any_bytes(content, tmp_path_factory):
    file = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    file.write_bytes(content)
    try:
        regions = read_header(file)
    except CheckpointError:
        return
    assert all(r.offset + r.length <= len(content) for r in regions.values())
