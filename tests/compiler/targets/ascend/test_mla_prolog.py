"""An MLA layer's projections as one operator: where, with which numbers, and why not elsewhere."""

import dataclasses

import pytest
import torch

from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend import npu_reference, stand_in
from hybridge.compiler.targets.ascend.choose_prologs import choose_prologs

from . import op_cases as cases

SOCS = ["ascend-a3", "ascend-950"]
needs_wheel = pytest.mark.skipif(
    stand_in.find_wheel() is None,
    reason="needs the torch-npu wheel: pip install --no-deps torch-npu==2.13.0",
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def refusals(case, soc="ascend-950", **bucket):
    prologs = choose_prologs(case.graph, soc, dataclasses.replace(case.bucket, **bucket))
    return [refusal.reason for refusal in prologs.result.refusals]


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("heads", [3, 4])
def test_one_operator_equals_its_parts(soc, heads):
    case = cases.prolog_case(heads=heads)
    lowered = case.lower(soc)
    assert lowered.sites["mla_prolog"] == ("npu_mla_prolog_v3",)
    assert "paged_write" not in lowered.sites
    expected, expected_caches = case.eager()
    actual, actual_caches = case.run(lowered)
    torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-4, atol=1e-3)
    cache = expected_caches["latent_cache_0"]
    torch.testing.assert_close(actual_caches["latent_cache_0"], cache, rtol=1e-4, atol=1e-4)


def test_prefill_too_where_heads_need_no_filling_up():
    case = cases.prolog_case(decode=False, heads=2)
    tokens = int(case.values["query_start"][-1])
    lowered = case.lower("ascend-950")
    assert lowered.sites["mla_prolog"] == ("npu_mla_prolog_v3",)
    torch.testing.assert_close(
        case.run(lowered)[0][:tokens], case.eager()[0][:tokens], rtol=1e-4, atol=1e-3
    )


def test_weights_are_prepared_once_in_the_operators_shapes():
    case = cases.prolog_case()
    weights = {weight.name: weight for weight in case.lower("ascend-950").weights}
    assert weights["q_a"].shape == (1024, 1536)
    assert weights["q_b"].shape == (1536, 4 * 192)  # three heads and one of zeros
    assert weights["kv_a"].shape == (1024, 576)
    assert weights["kv_b_key_up"].shape == (4, 128, 512)
    assert weights["kv_b_key_up"].source == "kv_b"


@pytest.mark.parametrize("swapped", [(5, 6), (1, 4), (7, 8), (9, 10)])
def test_arguments_in_another_order_are_caught(monkeypatch, swapped):
    case = cases.prolog_case()
    graph = case.lower("ascend-950")
    (node,) = [n for n in graph.graph_module.graph.nodes if "mla_prolog" in str(n.target)]
    args = list(node.args)
    args[swapped[0]], args[swapped[1]] = args[swapped[1]], args[swapped[0]]
    node.args = tuple(args)
    graph.graph_module.recompile()
    try:
        actual = case.run(graph)[0][:2]
    except (RuntimeError, IndexError):
        return
    assert not torch.allclose(actual, case.eager()[0][:2], rtol=1e-3, atol=1e-3)


def test_a_rotation_of_one_and_zero_turns_nothing():
    reference = npu_reference.REFERENCES["npu::npu_mla_prolog_v3"]
    shapes = ((1024, 8), (8, 2 * 12), (2, 8, 16), (1024, 16 + 4), (8,), (16,))
    given = [torch.randn(3, 1024), *(torch.randn(shape) for shape in shapes)]
    caches = [torch.zeros(2, 16, 1, 16), torch.zeros(2, 16, 1, 4)]
    where = {"cache_index": torch.tensor([0, 5, 17])}
    _, rope, *_ = reference(*given, torch.zeros(3, 4), torch.ones(3, 4), *caches, **where)
    low = npu_reference.REFERENCES["npu::npu_rms_norm"](given[0] @ given[1], given[5], 1e-5)[0]
    torch.testing.assert_close(rope, (low @ given[2]).unflatten(-1, (2, 12))[..., 8:])
    torch.testing.assert_close(caches[1].view(-1, 4)[[0, 5, 17]], (given[0] @ given[4])[:, 16:])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (lambda: cases.prolog_case(hidden=1000), "hidden size is 1000, must be 1024, 2048"),
        (
            lambda: cases.prolog_case(change=lambda n, v: v * 2 if n == "rope" else v),
            "mul is not part 1 of a split",
        ),
        (
            lambda: cases.prolog_case(change=lambda n, v: v.neg() if n == "key" else v),
            "neg is aten::neg, not hybridge::rms_norm",
        ),
        (
            lambda: cases.prolog_case(change=lambda n, v: v + 1 if n == "absorbed" else v),
            "add is aten::add, not aten::einsum",
        ),
    ],
)
def test_near_misses_stay_several_operators_with_the_reason(case, reason):
    (found,) = refusals(case())
    assert reason in found


def test_filling_up_heads_must_pay():
    case = cases.prolog_case(heads=12)
    (reason,) = refusals(case, tokens=65536)
    assert "filling 12 heads up to 16 costs" in reason
    assert refusals(case, tokens=4) == []


def reads_of(graph):
    """GE node -> the nodes before it by data."""
    before = {}
    for op in graph.op:
        direct = {name.split(":")[0] for name in op.input if name and not name.endswith(":-1")}
        before[op.name] = direct.union(*(before.get(name, set()) for name in direct))
    return before


@needs_wheel
@pytest.mark.parametrize(
    ("case", "writer", "readers"),
    [
        (cases.prolog_case, "MlaPrologV3", ("FusedInferAttentionScore",)),
        (
            lambda: cases.dsa_case(True),
            "ScatterNdUpdate",
            ("LightningIndexer", "SparseFlashAttention"),
        ),
        (lambda: cases.dsa_case(True), "ScatterPaKvCache", ("SparseFlashAttention",)),
        (lambda: cases.dense_case(True), "ScatterPaKvCache", ("FusedInferAttentionScore",)),
    ],
)
def test_a_cache_is_read_after_its_write_by_data(case, writer, readers):
    lowered = case().lower("ascend-950", torch.bfloat16)
    caches = {cache.name: cache.cache for cache in lowered.caches}
    graph = ge.convert(
        lowered.graph_module, caches, soc="ascend-950", cann_version="9.0.0", name="order"
    )
    assert graph.cache_copies == ()
    proto = ge.read_graph(graph.proto)
    before = reads_of(proto)
    writers = {op.name for op in proto.op if op.type == writer}
    assert writers
    for op in proto.op:
        if op.type in readers:
            assert writers & before[op.name], op.type
            assert not {n for n in op.input if n.split(":")[0] in caches}, "reads a cache as it was"
