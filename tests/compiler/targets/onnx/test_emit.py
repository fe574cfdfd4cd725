"""What an emitted graph looks like: names, aliases, weights outside, bodies inside, no traces of the build."""

from __future__ import annotations

import math

import onnx
import torch

from hybridge.artifacts.onnx_initializers import external_initializers
from hybridge.compiler.targets.onnx.emit import emit_onnx
from hybridge.models.caches import cache_shapes

BATCH = (
    "token_ids",
    "query_start",
    "context_len",
    "slot_mapping",
    "block_table",
    "state_slot",
    "logits_index",
)


def models(emitted):
    return {name: onnx.load_from_string(graph.model) for name, graph in emitted.graphs.items()}


def test_signature(emitted):
    caches = [cache.name for cache in cache_shapes(emitted.config)]
    for phase, model in models(emitted).items():
        graph = emitted.graphs[phase]
        names = [item.name for item in model.graph.input]
        assert names == [*BATCH, *caches] == [spec.name for spec in graph.inputs]
        outputs = [item.name for item in model.graph.output]
        assert outputs == ["logits", *(f"{name}_out" for name in caches)]
        assert outputs == [spec.name for spec in graph.outputs]
        sizes = {spec.name: spec.shape for spec in graph.inputs}
        tokens = "B" if phase == "decode" else "T"
        assert sizes["token_ids"] == sizes["slot_mapping"] == (tokens,)
        assert sizes["query_start"] == ("B+1",)
        assert sizes["block_table"] == ("B", "M")
        assert sizes["kda_state_0"][0] == "slots"
        assert graph.outputs[0].shape == ("L", emitted.config.vocab_size)
        assert set(graph.writes.values()) == {1}
        by_name = {spec.name: spec.shape for spec in graph.outputs}
        assert all(by_name[f"{name}_out"] == sizes[name] for name in caches)


def test_weights_are_outside(emitted):
    parameters = dict(emitted.model.named_parameters())
    for phase, model in models(emitted).items():
        graph = emitted.graphs[phase]
        found = {w.name: w for w in external_initializers(graph.model, phase)}
        assert list(found) == [weight.name for weight in graph.weights] == sorted(found)
        for weight in graph.weights:
            assert found[weight.name].shape == weight.shape
            assert f"torch.{found[weight.name].dtype}" == str(weight.dtype)
            assert weight.recipe is not None or tuple(parameters[weight.name].shape) == weight.shape
        inline = [t for t in model.graph.initializer if not t.external_data]
        assert sum(math.prod(tensor.dims) for tensor in inline) < 100


def test_no_op_on_weights_alone_is_left(emitted):
    """A runtime would fold it, and would need the weights' bytes for that."""
    for model in models(emitted).values():
        constant = {tensor.name for tensor in model.graph.initializer if tensor.external_data}
        for node in model.graph.node:
            assert not node.input or not constant.issuperset(node.input), node


def test_every_op_of_ours_has_a_body(emitted):
    for model in models(emitted).values():
        ours = {node.op_type for node in model.graph.node if node.domain == "hybridge"}
        assert ours == {function.name for function in model.functions}
        assert "Linear" in ours
        assert {(item.domain, item.version) for item in model.opset_import} >= {("hybridge", 1)}


def test_the_bytes_depend_on_the_model_alone(emitted):
    again = emit_onnx(list(emitted.traced.values()), emitted.stored)
    for phase, graph in emitted.graphs.items():
        assert again[phase].model == graph.model
        text = graph.model.decode("latin-1")
        assert "site-packages" not in text
        assert ".py" not in text


def test_bf16_stays_where_its_readers_take_it(emitted):
    for graph in emitted.graphs.values():
        dtypes = {weight.name: weight.dtype for weight in graph.weights}
        stored = dtypes["model.embed_tokens.weight"]
        narrow = {name for name, dtype in dtypes.items() if dtype is torch.bfloat16}
        assert (stored is torch.bfloat16) is bool(narrow)
        if narrow:
            assert "lm_head.weight" in narrow
            assert dtypes["model.layers.0.self_attn.dt_bias"] is torch.float32


def test_rounding_narrows_the_caches_that_kernels_read(emitted):
    """A plain read of a cache cannot widen it: as traced, caches stay fp32. States always do."""
    calls = {str(node.target) for node in emitted.traced["decode"].graph_module.graph.nodes}
    fused = any("sparse_flash_attention" in call or "mla_attention" in call for call in calls)
    graphs = emit_onnx(list(emitted.traced.values()), emitted.stored, bf16_activations=True)
    for graph in graphs.values():
        dtypes = {spec.name: spec.dtype for spec in (*graph.inputs, *graph.outputs)}
        for cache in cache_shapes(emitted.config):
            expected = "bfloat16" if cache.paged and fused else "float32"
            assert dtypes[cache.name] == dtypes[f"{cache.name}_out"] == expected


def test_the_traced_graphs_are_left_alone(emitted):
    for traced in emitted.traced.values():
        targets = {str(node.target) for node in traced.graph_module.graph.nodes}
        assert "hybridge.linear.default" not in targets
        assert not any("functional" in target for target in targets)
