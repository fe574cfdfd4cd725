"""The weights that a graph asks for are read from its bytes as the onnx package writes them."""

from __future__ import annotations

import numpy as np
import pytest

from hybridge.artifacts.errors import ArtifactError
from hybridge.artifacts.onnx_initializers import (
    GraphWeight,
    external_initializers,
    folded_initializers,
)

onnx = pytest.importorskip("onnx")


def model(location: str = "weights", data_type: int = 16, dims: tuple[int, ...] = (3, 0, 300)):
    weight = onnx.TensorProto(name="wéight", data_type=data_type, dims=dims)
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "0")):
        weight.external_data.add(key=key, value=value)
    inline = onnx.numpy_helper.from_array(np.ones(4, np.float32), "inline")
    graph = onnx.helper.make_graph([], "g", [], [], [inline, weight])
    return onnx.helper.make_model(graph, producer_name="x" * 300)


def test_external_initializers_are_listed() -> None:
    found = external_initializers(model().SerializeToString(), "m")
    assert found == [GraphWeight("wéight", "bfloat16", (3, 0, 300))]


@pytest.mark.parametrize("location", ["../weights", "/etc/passwd", "other", ""])
def test_only_one_location_is_allowed(location: str) -> None:
    with pytest.raises(ArtifactError, match="only 'weights' is allowed"):
        external_initializers(model(location).SerializeToString(), "m")


def test_odd_types_and_shapes_are_refused() -> None:
    for changed in (model(data_type=8), model(dims=(-1, 2))):
        with pytest.raises(ArtifactError, match="has type"):
            external_initializers(changed.SerializeToString(), "m")


def test_what_onnxruntime_folds_is_known() -> None:
    node = onnx.helper.make_node
    nodes = [
        node("Constant", [], ["axis"], value_ints=[0]),
        node("Transpose", ["folded"], ["t"]),
        node("Add", ["t", "folded_too"], ["u"]),
        node("Clip", ["folded_last", "", "u"], ["v"]),
        node("MatMul", ["x", "used"], ["y"]),
        node("Linear", ["kernel"], ["z"], domain="hybridge"),
        node("Mul", ["z", "used_by_output_of_kernel"], ["zz"]),
        node("Shape", ["only_shape"], ["s"]),
    ]
    names = [name for n in nodes for name in n.input if len(name) > 3]
    weights = [onnx.TensorProto(name=name, data_type=1, dims=[2]) for name in names]
    graph = onnx.helper.make_graph(nodes, "g", [], [], weights)
    found = folded_initializers(onnx.helper.make_model(graph).SerializeToString(), "m")
    assert found == {"folded", "folded_too", "folded_last"}


def test_damaged_bytes_never_hang_or_crash() -> None:
    data = model().SerializeToString()
    for cut in range(1, len(data)):
        try:
            external_initializers(data[:cut], "m")
            folded_initializers(data[:cut], "m")
        except ArtifactError:
            continue
    random = np.random.default_rng(0)
    for _ in range(200):
        try:
            external_initializers(random.bytes(64), "m")
        except ArtifactError:
            continue
