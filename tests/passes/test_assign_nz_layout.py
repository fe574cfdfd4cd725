"""FRACTAL_NZ where it is legal and pays; ND with the reason elsewhere (cases/README.md row 8)."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hybridge.compiler.targets.ascend.operators import define_operators
from hybridge.passes.assign_nz_layout import (
    AssignNzLayout,
    NzPolicy,
    WeightUse,
    broken_needs,
    decide,
    weight_uses,
)

ALL = NzPolicy()


def use(*shape, dtype="bfloat16", **more):
    return WeightUse("w", shape, dtype, ("mm",), **more)


def test_a_plain_matrix_is_laid_out_and_padded():
    layout = decide(use(100, 2048), ALL)
    assert layout.layout == "FRACTAL_NZ"
    assert layout.stored == (128, 7, 16, 16)
    assert layout.bytes == 128 * 7 * 16 * 16 * 2
    assert decide(use(100, 64, dtype="int8"), ALL).stored == (2, 7, 16, 32)
    assert decide(use(4, 100, 64), ALL).stored == (4, 4, 7, 16, 16)


@pytest.mark.parametrize("shape", [(1, 2048), (32, 1), (1, 64), (2, 32, 1)])
def test_a_unit_dimension_stays_nd(shape):
    layout = decide(use(*shape), ALL)
    assert (layout.layout, layout.rule) == ("ND", "unit dimension")
    assert str(shape) in layout.reason
    assert layout.stored == shape


@pytest.mark.parametrize(
    ("weight", "rule"),
    [
        (use(64, 64, dtype="float32"), "fp32"),
        (use(64), "not a matrix"),
        (use(65536, 64), "axis too long"),
        (use(64, 70000), "axis too long"),
        (use(64, 64, through_view="slice (slice_1)"), "view"),
        (use(64, 64, as_matrix=False), "not multiplied by"),
        (use(8, 64, 64, dtype="uint8", packed=4, group=32), "4-bit group"),
        (
            WeightUse("w", (8, 64, 64), "int8", ("npu_grouped_matmul",), per_tensor_scale=True),
            "per-tensor fp8",
        ),
    ],
)
def test_what_cannot_be_stays_nd_with_the_reason(weight, rule):
    layout = decide(weight, ALL)
    assert (layout.layout, layout.rule) == ("ND", rule)
    assert layout.reason


def test_longest_legal_axis_and_groups():
    assert decide(use(65535, 64), ALL).layout == "FRACTAL_NZ"
    packed = use(8, 64, 64, dtype="uint8", packed=4, group=64)
    assert decide(packed, ALL).layout == "FRACTAL_NZ"


def test_modes_and_a_soc_that_keeps_nd():
    assert decide(use(64, 64), NzPolicy(mode="off")).rule == "mode"
    assert decide(use(64, 64), NzPolicy(mode="quantised")).rule == "mode"
    assert decide(use(64, 64), NzPolicy(only_where_needed=True)).rule == "not needed"


def test_what_an_operator_takes_in_nz_only_is_laid_out_whatever_the_mode():
    policy = NzPolicy(mode="off", only_where_needed=True)
    needed = use(768, 7168, needed_by="mega_recurrent_kda")
    layout = decide(needed, policy)
    assert (layout.layout, layout.rule) == ("FRACTAL_NZ", "needed by its operator")
    assert "allocation roots" in layout.source
    # ... and what cannot be is told, so that the compile can stop.
    sliced = use(768, 7168, needed_by="mega_recurrent_kda", through_view="slice (slice_1)")
    assert decide(sliced, policy).rule == "view"
    (problem,) = broken_needs([decide(sliced, policy)], [sliced])
    assert "w: mega_recurrent_kda takes it in FRACTAL_NZ only, but read through slice" in problem
    assert broken_needs([layout], [needed]) == []


def test_mxfp4_experts_are_laid_out_in_blocks_of_32_elements():
    mx = use(8, 64, 96, dtype="uint8", packed=4, group=32, mx=True, needed_by="npu_grouped_matmul")
    layout = decide(mx, NzPolicy(only_where_needed=True))
    assert layout.layout == "FRACTAL_NZ"
    assert layout.stored == (8, 6, 4, 16, 16)  # 16 bytes, which are 32 elements of 4 bits
    assert "mxfp4.py" in layout.source


def graph_of(function, *inputs):
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph, [node.name for node in graph.nodes if node.op == "placeholder"]


def test_uses_are_read_from_the_graph():
    def function(x, plain, split, table, ids, router):
        first, second = split.view(2, 8, 16).split((4, 4), 1)
        heads = torch.bmm(x.view(2, 4, 16), first.transpose(1, 2))
        return (
            x @ plain.t(),
            heads,
            second,
            torch.embedding(table, ids),
            x.float() @ router.t(),
        )

    bf16 = torch.bfloat16
    x = torch.empty(8, 16, dtype=bf16)
    graph, names = graph_of(
        function,
        *(x, torch.empty(32, 16, dtype=bf16), torch.empty(16, 16, dtype=bf16)),
        *(torch.empty(64, 16, dtype=bf16), torch.empty(8, dtype=torch.int64), torch.empty(4, 16)),
    )
    weights = [names[i] for i in (1, 2, 3, 5)]
    uses = {use.name: use for use in weight_uses(graph, weights)}
    result, plan = AssignNzLayout().run(uses.values(), ALL)
    rules = {layout.name: layout.rule for layout in plan}
    assert [rules[name] for name in weights] == [
        *("multiplied by a matrix", "not multiplied by", "not multiplied by", "fp32")
    ]
    assert uses[weights[1]].through_view.startswith("view")
    assert len(result.matches) == 1
    assert len(result.refusals) == 3
    assert all(refusal.remedy for refusal in result.refusals)


def test_weights_that_operators_take_in_nz_only_are_found_in_the_graph():
    define_operators()
    bf16 = torch.bfloat16

    def function(x, dq, uq, uk, dkv, cq, ckv, angle, kv, kr, where, packed, scale, counts):
        query, *_ = torch.ops.npu.npu_mla_prolog_v3(
            *(x, dq, uq, uk, dkv, cq, ckv, angle, angle, kv, kr), cache_index=where
        )
        rows, row_scale = torch.ops.npu.npu_dynamic_mx_quant(x, dst_type=292)
        mixed = torch.ops.npu.npu_grouped_matmul(
            [rows],
            [packed.transpose(1, 2)],
            antiquant_scale=[scale],
            per_token_scale=[row_scale],
            group_list=counts,
        )
        return query, mixed[0]

    def empty(*shape, dtype=bf16):
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, byte = 4, torch.uint8
    gm = make_fx(function)(
        *(empty(rows, 64), empty(64, 32), empty(32, 48), empty(2, 16, 32), empty(64, 40)),
        *(empty(32), empty(32), empty(rows, 8), empty(2, 16, 1, 32), empty(2, 16, 1, 8)),
        *(empty(rows, dtype=torch.int64), empty(2, 96, 32, dtype=byte)),
        *(empty(2, 1, 96, 2, dtype=byte), empty(2, dtype=torch.int64)),
    )
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    weights = [names[place] for place in (1, 2, 3, 4, 11)]
    uses = weight_uses(gm.graph, weights, {names[11]: 32})
    prolog, experts = "npu_mla_prolog_v3", "npu_grouped_matmul"
    assert [each.needed_by for each in uses] == [prolog, prolog, "", prolog, experts]
    _, plan = AssignNzLayout().run(uses, NzPolicy(only_where_needed=True))
    assert [layout.layout for layout in plan] == [*["FRACTAL_NZ"] * 2, "ND", *["FRACTAL_NZ"] * 2]
