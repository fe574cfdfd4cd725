"""Graphs of open sizes: -1 in the protobuf, and equal to eager at any size."""

import pytest
import torch

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.pipeline import run_pipeline
from hybridge.compiler.reference import check_values
from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.device.graph_reader import read_graph
from hybridge.compiler.targets.ascend.device_state import from_device, to_device
from hybridge.compiler.targets.ascend.emit import emit_ascend
from hybridge.compiler.targets.ascend.lowering import lower
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.compiler.targets.ascend.options import AscendOptions, parse_buckets
from hybridge.compiler.targets.ascend.prepared_weights import apply_steps
from hybridge.compiler.targets.ascend.symbolic_sizes import SymbolicSizes
from hybridge.compiler.trace import trace
from hybridge.ir.derived import materialise
from hybridge.models.model import HybridModel

from .conftest import BLOCK, legal_config

SOCS = ("ascend-950", "ascend-a3")
BATCH = ("token_ids", "query_start", "context_len", "slot_mapping", "block_table", "state_slot")


@pytest.fixture(scope="module")
def config():
    return legal_config(dtype="float32")


@pytest.fixture(scope="module")
def fused(config):
    found, proofs = {}, {}
    for phase in ("prefill", "decode"):
        found[phase] = trace(config, phase, block_size=BLOCK)
        run_pipeline(
            found[phase].graph_module, phase, config, weights=found[phase].weights, proofs=proofs
        )
    return found


@pytest.fixture(scope="module")
def model(config):
    generator = torch.Generator().manual_seed(0)
    model = HybridModel(config).requires_grad_(False)
    for name, parameter in model.named_parameters():
        spread = 1.0 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        noise = torch.randn(parameter.shape, generator=generator) * spread
        parameter.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else noise)
    return model


def first(values, sequences, columns):
    """The batch of its first sequences only, over a block table of so many columns."""
    tokens = int(values["query_start"][sequences])
    wanted = values["logits_index"]
    cut = {
        "token_ids": values["token_ids"][:tokens],
        "query_start": values["query_start"][: sequences + 1],
        "context_len": values["context_len"][:sequences],
        "slot_mapping": values["slot_mapping"][:tokens],
        "block_table": values["block_table"][:sequences, :columns],
        "state_slot": values["state_slot"][:sequences],
        "logits_index": wanted[wanted < tokens],
    }
    return {**values, **cut}


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_graph_equals_eager_at_every_size(config, model, fused, phase, soc):
    traced, values = fused[phase], check_values(model, phase, BLOCK)
    paged = next(cache for cache in traced.caches if cache.paged)
    state = next(cache for cache in traced.caches if not cache.paged)
    blocks, slots = values[paged.name].shape[0], values[state.name].shape[0]
    lowered = lower(
        traced.graph_module,
        soc=soc,
        phase=phase,
        bucket=Bucket(7, 7, blocks, BLOCK, 7, slots, 7, dynamic=True),
        caches=traced.caches,
        latent_width=config.kv_lora_rank,
        dtype=torch.float32,
    )
    count, columns = values["block_table"].shape
    logits = {len(run(traced, model, lowered, first(values, n, columns))) for n in (1, 2, count)}
    assert len(logits) > 1


def run(traced, model, lowered, values):
    """Run by reference and compare with eager, logits and caches; the logits."""
    recipes = traced.graph_module.meta.get("derived_weights", {})
    device = {each.name: values[each.name] for each in lowered.batch}
    device |= {cache.name: to_device(cache, values[cache.cache]) for cache in lowered.caches}
    for weight in lowered.weights:
        value = materialise(weight.source, recipes, values.__getitem__)
        device[weight.name] = apply_steps(weight, value)
    inputs = [n.name for n in lowered.graph_module.graph.nodes if n.op == "placeholder"]
    (logits,) = lowered.graph_module(*(device[name] for name in inputs))
    caches = {cache.name: values[cache.name].clone() for cache in traced.caches}
    batch = {each.name: values[each.name] for each in lowered.batch}
    expected = model(lowered.phase, **batch, caches=caches)
    torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)
    written = from_device(lowered.caches, device)
    for name, value in caches.items():
        torch.testing.assert_close(written[name], value, rtol=2e-3, atol=2e-3)
    return logits


@pytest.fixture(scope="module", params=SOCS)
def emitted(config, fused, request):
    options = AscendOptions(
        request.param,
        **parse_buckets("decode=4/dynamic,prefill=dynamic,sequences=2,blocks=8,columns=2,slots=4"),
        block_size=BLOCK,
        convert=stand_in.find_wheel() is not None,
    )
    return emit_ascend(list(fused.values()), config, options)


@pytest.mark.skipif(stand_in.find_wheel() is None, reason="needs the torch-npu wheel")
def test_the_protobuf_has_open_sizes_and_static_caches(emitted):
    from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

    for name in ("prefill", "decode_dynamic"):
        graph = GraphDef()
        graph.ParseFromString(emitted.files[f"graphs/{name}.pb"])
        shapes = {op.name: list(op.output_desc[0].shape.dim) for op in graph.op if op.output_desc}
        assert all(set(shapes[each]) == {-1} for each in BATCH)
        assert shapes["kda_state_0"][0] == 4 + 1
        attributes = {key for op in graph.op for key in op.attr}
        assert ge.STREAM_LABEL not in attributes
        assert ge.SUPER_KERNEL_SCOPE not in attributes
        data = emitted.target_data["ascend"]["graphs"][name]
        assert (data["dynamic"], data["cache_copies"]) == (True, 0)
    data = emitted.target_data["ascend"]["graphs"]["decode_b4"]
    assert not data["dynamic"]
    assert data["super_kernel_scopes"] > 0


def test_the_manifest_names_open_sizes(emitted):
    prefill = emitted.phases["prefill"]
    shapes = {each.name: each.shape for each in prefill.inputs}
    assert shapes["query_start"] == ("sequences + 1",)
    assert shapes["block_table"] == ("sequences", "columns")
    assert prefill.outputs[0].shape[0] == "logits"
    assert prefill.buckets == ()
    assert [each["tokens"] for each in emitted.phases["decode"].buckets] == [4]


@pytest.mark.skipif(stand_in.find_wheel() is None, reason="needs the torch-npu wheel")
def test_the_rebuilt_graph_converts_to_the_same_bytes(emitted):
    data = emitted.target_data["ascend"]
    caches = {each["name"]: each["cache"] for each in data["state_layout"]["caches"]}
    for name in ("prefill", "decode_dynamic"):
        graph = read_graph(emitted.files[f"graphs/{name}_npu.json"], name)
        again = ge.convert(graph, caches, soc=data["soc"], cann_version="9.0.0", name=name)
        assert again.proto == emitted.files[f"graphs/{name}.pb"]
        source = emitted.files[f"graphs/{name}_npugraph_ex.py"].decode()
        compile(source, name, "exec")
        assert "built-in" not in source


def test_a_size_that_is_taken_as_a_number_is_an_error():
    sizes = SymbolicSizes()
    tokens, starts = sizes.shape(("tokens", "sequences + 1"))
    assert sizes.texts((3, tokens, starts)) == [3, "tokens", "sequences + 1"]
    sizes.require_open("lowering")
    int(tokens)
    with pytest.raises(CompileError, match=r"lowering: .*\n  Eq\(tokens, \d+\)"):
        sizes.require_open("lowering")


def test_buckets():
    found = parse_buckets("decode=dynamic/4,prefill=dynamic")
    assert found == {
        "dynamic": ("decode", "prefill"),
        "decode_sequences": (4,),
        "prefill_tokens": (),
    }
    options = AscendOptions("ascend-950", **found)
    assert {name: b.dynamic for name, b in options.buckets("decode").items()} == {
        "decode_b4": False,
        "decode_dynamic": True,
    }
    assert [b.dynamic for b in options.buckets("prefill").values()] == [True]
    with pytest.raises(UsageError, match="blocks=dynamic"):
        parse_buckets("blocks=dynamic")


def test_not_where_devices_share_experts():
    with pytest.raises(UsageError, match="at most 512"):
        AscendOptions("ascend-950", dynamic=("decode",), expert_parallel=2)
