"""Weight bytes of an Ascend artifact: what the graphs read, laid out as planned, nothing else."""

import json
import shutil

import numpy as np
import pytest
import torch

from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import ArtifactError
from hybridge.compiler.targets.ascend import nz, stored_weights
from hybridge.compiler.targets.ascend.prepared_weights import PreparedWeight, by_rows
from hybridge.compiler.targets.ascend.stored_weights import (
    StoredWeight,
    bits,
    from_bits,
    pieces,
    read_stored,
)
from hybridge.compiler.weight_reader import WeightReader
from hybridge.models.checkpoint import Checkpoint
from hybridge.models.config import load_config
from hybridge.ops.moe import decode_mxfp4
from hybridge.passes.assign_nz_layout import FRACTAL_NZ, Layout, stored_shape

from .conftest import compile_legal

GATE_UP = "model.layers.1.block_sparse_moe.experts.gate_up"


def reader_of(folder):
    return WeightReader(load_config(folder), Checkpoint.open(folder), {})


def stored(name, source, shape, layout, *, steps=(), dtype=torch.bfloat16, scale=""):
    weight = PreparedWeight(name, source, shape, dtype, steps, scale)
    laid = stored_shape(shape, dtype.itemsize) if layout == FRACTAL_NZ else shape
    return StoredWeight(name, weight, Layout(name, layout, shape, laid, 0, "", ""))


@pytest.fixture(params=[64 << 20, 512, 1])
def piece_bytes(request, monkeypatch):
    """Whole weights at a time, some rows or strips, and one row or strip."""
    monkeypatch.setattr(stored_weights, "PIECE_BYTES", request.param)


@pytest.mark.parametrize(
    "source", ["model.layers.3.self_attn.q_a_proj.weight", GATE_UP, "lm_head.weight"]
)
@pytest.mark.parametrize("layout", [FRACTAL_NZ, "ND"])
def test_pieces_make_up_the_weight_bit_for_bit(legal_checkpoints, piece_bytes, source, layout):
    reader = reader_of(legal_checkpoints["bfloat16"])
    plain = reader.value(source)
    each = stored("w", source, tuple(plain.shape), layout)
    data = b"".join(piece.tobytes() for piece in pieces(reader, each))
    expected = nz.encode(bits(plain)) if layout == FRACTAL_NZ else bits(plain)
    assert data == expected.tobytes()
    array = np.frombuffer(data, np.uint16).reshape(each.layout.stored)
    back = read_stored(array, plain.shape, layout, "bfloat16")
    assert torch.equal(back.view(torch.int16), plain.view(torch.int16))


def test_steps_are_done_on_pieces_of_a_stack(legal_checkpoints, piece_bytes):
    reader = reader_of(legal_checkpoints["bfloat16"])
    swapped = reader.value(GATE_UP).transpose(1, 2).contiguous()
    steps = (("aten.transpose.int", (1, 2), ()), ("aten.clone.default", (), ()))
    each = stored("w", GATE_UP, tuple(swapped.shape), FRACTAL_NZ, steps=steps)
    data = b"".join(piece.tobytes() for piece in pieces(reader, each))
    assert data == nz.encode(bits(swapped)).tobytes()


def test_mxfp4_is_decoded_expert_by_expert(legal_checkpoints, piece_bytes):
    reader = reader_of(legal_checkpoints["mxfp4"])
    packed, scale = f"{GATE_UP}_packed", f"{GATE_UP}_scale"
    plain = decode_mxfp4(reader.value(packed), reader.value(scale)).to(torch.bfloat16)
    steps = (("decode_mxfp4", (), ()),)
    each = stored("w", packed, tuple(plain.shape), FRACTAL_NZ, steps=steps, scale=scale)
    data = b"".join(piece.tobytes() for piece in pieces(reader, each))
    assert data == nz.encode(bits(plain)).tobytes()


def test_a_devices_part_of_the_experts(legal_checkpoints, piece_bytes):
    reader = reader_of(legal_checkpoints["bfloat16"])
    own = reader.value(GATE_UP)[2:6].transpose(1, 2).contiguous()
    steps = (
        ("aten.slice.Tensor", (0, 2, 6), ()),
        ("aten.transpose.int", (1, 2), ()),
        ("aten.clone.default", (), ()),
    )
    each = stored("w", GATE_UP, tuple(own.shape), "ND", steps=steps)
    assert b"".join(piece.tobytes() for piece in pieces(reader, each)) == bits(own).tobytes()


def test_which_steps_need_the_whole_weight():
    def rows(*steps, rank=2):
        return by_rows(PreparedWeight("w", "w", (2, 2), torch.bfloat16, steps), rank)

    exp = ("aten.exp.default", (), ())
    assert rows(exp)[1] == 0
    assert rows(("aten.transpose.int", (-1, 1), ()), rank=3)[1] == 0
    cut, first = rows(exp, ("aten.slice.Tensor", (0, 4, 8), ()))
    assert (cut.steps, first) == ((exp,), 4)
    assert rows(("aten.slice.Tensor", (1, 4, 8), ())) is None
    assert rows(("aten.transpose.int", (-2, 1), ())) is None
    assert rows(("aten.t.default", (), ())) is None
    assert rows(("aten.flip.default", ([0],), ())) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_bits_come_back(dtype):
    values = torch.arange(24).view(4, 6).to(dtype)
    again = from_bits(bits(values.t()), dtype)
    assert torch.equal(again.float(), values.t().float())


def plan_of(root, graph):
    return json.loads((root / f"graphs/{graph}_weights.json").read_text())


def test_the_plan_says_what_lies_in_the_artifact(legal_artifact):
    opened = open_artifact(legal_artifact)
    data = opened.manifest.target_data["ascend"]
    assert data["nz_weights"] > 0
    named = set()
    for graph in data["graphs"]:
        for each in plan_of(legal_artifact, graph):
            entry = opened.weights[each["weight"]]
            named.add(entry.name)
            assert (list(entry.shape), entry.dtype) == (each["stored"], each["dtype"])
            assert (entry.place, entry.length) == ("artifact", each["bytes"])
            if each["layout"] == FRACTAL_NZ:
                width = {"bfloat16": 2, "uint8": 1}[each["dtype"]]
                block = each["stored"][-1] * width
                assert each["stored"] == list(nz.padded_shape(each["shape"], width, block))
                assert entry.origin.transform.endswith(FRACTAL_NZ)
    assert named == set(opened.weights)


def test_graphs_that_read_a_weight_alike_share_its_bytes(legal_artifact):
    plans = {g: plan_of(legal_artifact, g) for g in ("decode_b1", "decode_b3", "prefill")}
    names = {g: {each["input"]: each["weight"] for each in plan} for g, plan in plans.items()}
    assert names["decode_b1"] == names["decode_b3"]
    other = {k for k, v in names["prefill"].items() if v != names["decode_b1"][k]}
    assert other, "some weights are read in another form in prefill"
    assert all("A_log" in name or "conv_weight" in name for name in other)


def test_damage_to_a_weight_is_found(legal_artifact, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(legal_artifact, copy)
    (shard,) = (copy / "weights").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ArtifactError, match="sha256"):
        open_artifact(copy)


def test_reference_refers_to_what_serves_as_it_is(legal_checkpoints, tmp_path):
    source = "short"
    out = compile_legal(
        legal_checkpoints[source],
        tmp_path / "art",
        "ascend-950",
        weights="reference",
        phases=("decode",),
        convert=False,
    )
    opened = open_artifact(out, verify="full")
    places = {name: entry.place for name, entry in opened.weights.items()}
    assert places["model_embed_tokens_weight"] == "checkpoint"
    assert places["model_layers_1_block_sparse_moe_experts_gate_up"] == "artifact"
    name = "model.embed_tokens.weight"
    value = reader_of(legal_checkpoints[source]).value(name).to(torch.bfloat16)
    assert np.array_equal(opened.weight("model_embed_tokens_weight"), bits(value))


def test_a_compile_that_fails_leaves_nothing(legal_checkpoints, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(stored_weights, "_strips", fail)
    monkeypatch.setattr(stored_weights, "bits", fail)
    with pytest.raises(RuntimeError, match="disk is full"):
        compile_legal(
            legal_checkpoints["short"],
            tmp_path / "art",
            "ascend-950",
            phases=("decode",),
            decode_sequences=(1,),
            convert=False,
        )
    assert list(tmp_path.iterdir()) == []


def test_an_fp32_checkpoint_is_rounded_where_graphs_read_bf16(legal_checkpoints):
    reader = reader_of(legal_checkpoints["float32"])
    name = "model.embed_tokens.weight"
    plain = reader.value(name)
    each = stored("w", name, tuple(plain.shape), "ND")
    (piece,) = pieces(reader, each)
    assert np.array_equal(piece, bits(plain.to(torch.bfloat16)))


def test_what_is_computed_is_computed_in_fp32(legal_checkpoints):
    reader = reader_of(legal_checkpoints["bfloat16"])
    name = "model.layers.0.self_attn.A_log"
    plain = reader.value(name)
    steps = (("aten.exp.default", (), ()),)
    each = stored("w", name, tuple(plain.shape), "ND", steps=steps, dtype=torch.float32)
    (piece,) = pieces(reader, each)
    assert np.array_equal(piece, bits(plain.float().exp()))
