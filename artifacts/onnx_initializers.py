"""The weights that an ONNX graph asks for, read from its bytes without the onnx package.

onnxruntime takes an initializer given at run time on trust: one of another shape or type is read
out of bounds. So the runner compares what the graph declares with what the weights file offers, and
for that needs name, type, shape and location of the top graph's external initializers, and the names
that its nodes read and write. Field numbers are those of onnx.proto (ModelProto.graph 7; GraphProto:
node 1, initializer 5; NodeProto: input 1, output 2, op_type 4, domain 7; TensorProto: dims 1,
data_type 2, name 8, external_data 13, data_location 14; StringStringEntryProto: key 1, value 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridge.artifacts.dtypes import from_onnx
from hybridge.artifacts.errors import ArtifactError

LOCATION = "weights"
# onnxruntime wants the file that external initializers name to exist, even when every one of them
# is given by the runner. It stays empty, so that reading it can only fail, never mislead.
GRAPH_WEIGHTS = f"graphs/{LOCATION}"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1
_MODEL_GRAPH, _GRAPH_NODE, _GRAPH_INITIALIZER = 7, 1, 5
_NODE_INPUT, _NODE_OUTPUT, _NODE_OP_TYPE, _NODE_DOMAIN = 1, 2, 4, 7
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL_DATA, _DATA_LOCATION = 1, 2, 8, 13, 14


@dataclass(frozen=True)
class GraphWeight:
    """An external initializer: its name, element type name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def external_initializers(model: bytes, where: str) -> list[GraphWeight]:
    """The external initializers of a serialized ``ModelProto``'s graph.

    Args:
        model: the file's bytes.
        where: its name, for messages.

    Raises:
        ArtifactError: not a well-formed message, or an initializer that points to another file than
            the one the format allows.
    """
    try:
        tensors = _graph_messages(model, _GRAPH_INITIALIZER)
        return [weight for tensor in tensors if (weight := _external(tensor, where)) is not None]
    except (IndexError, ValueError) as error:
        raise ArtifactError(f"{where}: no ONNX model: {error}", "compile it again") from None


def folded_initializers(model: bytes, where: str) -> frozenset[str]:
    """The initializers whose values onnxruntime needs while it loads the graph, to fold constants.

    It evaluates standard operators whose inputs are all constant; one of another domain, such as a
    kernel of ours, is never evaluated. `Shape` and `Size` of a constant are known without its values.

    Raises:
        ArtifactError: not a well-formed message.
    """
    try:
        initializers = {_tensor_name(t) for t in _graph_messages(model, _GRAPH_INITIALIZER)}
        constant, needed = set(initializers), set[str]()
        for node in _graph_messages(model, _GRAPH_NODE):
            inputs, outputs, op_type, domain = _node(node)
            if domain not in ("", "ai.onnx") or not constant.issuperset(inputs):
                continue
            constant.update(outputs)
            if op_type not in ("Shape", "Size"):
                needed.update(inputs)
        return frozenset(needed & initializers)
    except (IndexError, ValueError) as error:
        raise ArtifactError(f"{where}: no ONNX model: {error}", "compile it again") from None


def _graph_messages(model: bytes, wanted: int) -> Iterator[memoryview]:
    for number, graph in _messages(memoryview(model)):
        if number == _MODEL_GRAPH:
            yield from (value for field, value in _messages(graph) if field == wanted)


def _tensor_name(tensor: memoryview) -> str:
    return next((str(value, "utf-8") for field, value in _messages(tensor) if field == _NAME), "")


def _node(node: memoryview) -> tuple[list[str], list[str], str, str]:
    """Inputs (without those left out), outputs, operator and domain."""
    texts: dict[int, list[str]] = {
        field: [] for field in (_NODE_INPUT, _NODE_OUTPUT, _NODE_OP_TYPE, _NODE_DOMAIN)
    }
    for field, value in _messages(node):
        if field in texts:
            texts[field].append(str(value, "utf-8"))
    inputs = [name for name in texts[_NODE_INPUT] if name]
    op_type, domain = ("".join(texts[field]) for field in (_NODE_OP_TYPE, _NODE_DOMAIN))
    return inputs, texts[_NODE_OUTPUT], op_type, domain


def _external(tensor: memoryview, where: str) -> GraphWeight | None:
    dims: list[int] = []
    data_type, location, name, file = 0, 0, "", ""
    for number, value in _fields(tensor):
        if number == _DIMS:
            dims += [value] if isinstance(value, int) else _packed(value)
        elif number == _DATA_TYPE and isinstance(value, int):
            data_type = value
        elif number == _DATA_LOCATION and isinstance(value, int):
            location = value
        elif number == _NAME and not isinstance(value, int):
            name = str(value, "utf-8")
        elif number == _EXTERNAL_DATA and not isinstance(value, int):
            file = _location(value) or file
    if location != _EXTERNAL:
        return None
    return _checked(name, data_type, dims, file, where)


def _checked(name: str, data_type: int, dims: list[int], file: str, where: str) -> GraphWeight:
    if file != LOCATION:
        raise ArtifactError(
            f"{where}: initializer {name!r} lies in {file!r}; only {LOCATION!r} is allowed",
            "compile the artifact again",
        )
    element = from_onnx(data_type)
    if element is None or any(dim < 0 or dim >= 1 << 63 for dim in dims):
        raise ArtifactError(
            f"{where}: initializer {name!r} has type {data_type} and shape {dims}",
            "compile the artifact again",
        )
    return GraphWeight(name, element.name, tuple(dims))


def _location(entry: memoryview) -> str:
    texts = {number: str(value, "utf-8") for number, value in _messages(entry)}
    return texts.get(2, "") if texts.get(1) == "location" else ""


def _messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    return ((number, value) for number, value in _fields(data) if not isinstance(value, int))


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a message: (number, integer or bytes)."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, position = _varint(data, position)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if size > len(data) - position:
            raise ValueError(f"a field of {size} bytes in {len(data) - position}")
        if wire == _BYTES:
            yield key >> 3, data[position : position + size]
        position += size


def _packed(data: memoryview) -> list[int]:
    values, position = [], 0
    while position < len(data):
        value, position = _varint(data, position)
        values.append(value)
    return values


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
    raise ValueError("a number of more than ten bytes")
