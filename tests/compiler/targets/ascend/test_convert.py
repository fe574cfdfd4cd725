"""GE graphs by the real torchair: what they hold, read back from the protobuf."""

from dataclasses import replace

import pytest
import torch

from hybridge.artifacts.errors import CompileError
from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend import stand_in
from hybridge.passes.assign_streams import AssignStreams
from hybridge.passes.merge_super_kernels import MergeSuperKernels, SuperKernelPolicy

from . import op_cases as cases
from .lowered_graphs import MACHINE, experts, indexer_prolog, spread_experts

pytestmark = pytest.mark.skipif(
    stand_in.find_wheel() is None,
    reason="needs the torch-npu wheel: pip install --no-deps torch-npu==2.13.0",
)
SOCS = ["ascend-a3", "ascend-950"]


def convert(case, soc):
    lowered = case.lower(soc, torch.bfloat16)
    caches = {cache.name: cache.cache for cache in lowered.caches}
    return ge.convert(
        lowered.graph_module, caches, soc=soc, cann_version="9.0.0", name=lowered.phase
    )


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("decode", [False, True])
def test_indexer_and_attention_copy_no_cache(soc, decode):
    graph = convert(cases.dsa_case(decode), soc)
    assert graph.nodes["LightningIndexer"] == 1
    assert graph.nodes["SparseFlashAttention"] == 1
    assert graph.nodes["ScatterNdUpdate"] == graph.nodes["ScatterPaKvCache"] == 1
    assert (graph.cache_copies, graph.moves) == ((), 0)


@pytest.mark.parametrize("soc", SOCS)
def test_dense_attention(soc):
    graph = convert(cases.dense_case(True), soc)
    assert graph.nodes["FusedInferAttentionScore"] == 1
    assert graph.cache_copies == ()


@pytest.mark.parametrize("soc", SOCS)
def test_kda(soc):
    prefill = convert(cases.kda_prefill_case(-5.0), soc)
    assert prefill.nodes["ChunkKdaFwd"] == 1
    assert prefill.nodes.get("CausalConv1d", 0) == (soc == "ascend-950")
    decode = convert(cases.kda_decode_case(False), soc)
    assert decode.nodes["RecurrentGatedDeltaRule"] == 1
    assert prefill.cache_copies == decode.cache_copies == ()


def test_attention_residuals():
    fused = convert(cases.attn_res_case(), "ascend-950")
    assert fused.nodes["BlockAttnResPrepare"] == 1
    assert fused.nodes["BlockAttnResUpdate"] == 4
    assert fused.nodes["RmsNorm"] == 3
    assert "CANN 9.0.0 has the GE operator BlockAttnResPrepare" in fused.unverified
    assert "BlockAttnResPrepare" not in convert(cases.attn_res_case(), "ascend-a3").nodes


@pytest.mark.parametrize("soc", SOCS)
def test_experts(soc):
    graph = convert(cases.moe_case("situ"), soc)
    for operator in ("MoeGatingTopK", "MoeInitRoutingV3", "SituGlu", "MoeFinalizeRoutingV2"):
        assert graph.nodes[operator] == 1
    assert graph.nodes["GroupedMatmul"] == 2


def test_mxfp4_experts():
    graph = convert(cases.moe_case("situ", mxfp4=True), "ascend-950")
    assert graph.nodes["DynamicMxQuant"] == graph.nodes["GroupedMatmul"] == 2
    # A3 has no FP4: its weights are decoded when they are read.
    assert "DynamicMxQuant" not in convert(cases.moe_case("situ", mxfp4=True), "ascend-a3").nodes


def test_own_attributes_are_in_the_protobuf():
    graph = ge.read_graph(convert(cases.kda_prefill_case(-5.0), "ascend-950").proto)
    (node,) = [op for op in graph.op if op.type == "ChunkKdaFwd"]
    assert node.attr["layout"].s == b"TND"
    assert node.attr["state_v_first"].b
    assert node.attr["lower_bound"].f == -5.0
    names = [desc.name for desc in node.input_desc]
    assert names[:5] == ["q", "k", "v", "g", "beta"]


def test_what_cannot_be_converted_is_told_with_its_nodes():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 4)
    put = graph.call_function(torch.ops.aten.index_put.default, (x, [x], x))
    graph.output((put,))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(CompileError, match=r"aten.index_put.default: index_put"):
        ge.convert(module, {}, soc="ascend-950", cann_version="9.0.0", name="bad")


def test_the_stand_in_refuses_what_needs_a_device():
    core = ge.load_torchair("9.0.0", "ascend-950")
    import torchair.core._backend as backend

    with pytest.raises(stand_in.NeedsDeviceError, match="needs CANN or an NPU"):
        backend.TorchNpuGraph("graph").compile()
    with pytest.raises(stand_in.NeedsDeviceError), core.as_torch_npu():
        __import__("torch_npu").npu.current_device()


def lowered(make):
    gm = make()
    AssignStreams().run(gm, MACHINE)
    MergeSuperKernels().run(gm, replace(MACHINE, launch=1e-3), SuperKernelPolicy())
    graph = ge.convert(gm, {}, soc="ascend-950", cann_version="9.0.0", name="streams")
    return gm, ge.read_graph(graph.proto)


def before(graph):
    """Operator -> everything that precedes it by data or control."""
    seen = {}
    for op in graph.op:
        direct = {name.split(":")[0] for name in op.input if name}
        seen[op.name] = direct.union(*(seen.get(name, set()) for name in direct))
    return seen


def label(op, name):
    return op.attr[name].s.decode() if name in op.attr else ""


@pytest.mark.parametrize("make", [indexer_prolog, experts, spread_experts])
def test_streams_and_scopes_are_read_back_from_the_protobuf(make):
    gm, graph = lowered(make)
    wanted = {n.meta.get("stream", "main") for n in gm.graph.nodes}
    labels = {label(op, "_user_stream_label") or "main" for op in graph.op}
    assert labels == wanted
    scopes = {n.meta["super_kernel"] for n in gm.graph.nodes if "super_kernel" in n.meta}
    assert {label(op, "_super_kernel_scope") for op in graph.op} - {""} == scopes
    assert all("_user_stream_label" not in op.attr for op in graph.op if op.type == "Data")


def test_core_limits_are_read_back_from_the_protobuf():
    gm, graph = lowered(spread_experts)
    wanted = {tuple(map(str, n.meta["cores"])) for n in gm.graph.nodes if "cores" in n.meta}
    assert wanted
    limits = [
        (label(op, "_op_aicore_num"), label(op, "_op_vectorcore_num"))
        for op in graph.op
        if "_op_vectorcore_num" in op.attr
    ]
    assert set(limits) == wanted
    far = [op for op in graph.op if op.type.startswith("MoeDistribute")]
    assert any("_op_vectorcore_num" in op.attr for op in far)


def test_events_are_control_edges_between_the_operators_that_were_meant():
    _, graph = lowered(experts)
    order = before(graph)
    matmuls = [op for op in graph.op if op.type in ("MatMul", "GroupedMatmul")]
    side = [op.name for op in matmuls if label(op, "_user_stream_label") == "side"]
    assert len(side) == 2
    names = [op.name for op in matmuls]
    for first in names:
        for second in names:
            # No two Cube operators may run at once: data alone does not order these.
            assert first == second or first in order[second] or second in order[first]
    constants = [op for op in graph.op if op.type == "Const"]
    assert not any(name.endswith(":-1") for op in constants for name in op.input)
