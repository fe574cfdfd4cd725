"""FRACTAL_NZ where it is legal and pays; ND with the reason elsewhere (cases/README.md row 8)."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hybridge.passes.assign_nz_layout import (
    AssignNzLayout,
    NzPolicy,
    WeightUse,
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


def test_an_allocation_root_that_an_operator_needs_is_laid_out_whatever_the_mode():
    policy = NzPolicy(mode="off", only_where_needed=True, needed=frozenset({"w"}))
    assert decide(use(768, 7168), policy).layout == "FRACTAL_NZ"
    # ... and what cannot be is still told, so that the compile can stop.
    assert decide(use(768, 7168, through_view="slice"), policy).rule == "view"


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
