"""Addition and norm as one operator: where, with which numbers, and why not elsewhere."""

import pytest
import torch

from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend import stand_in

from .cases import make_case

OPS = torch.ops.hybridge


def residual_case(add=lambda x, y: x + y):
    def function(x, y, weight, up, **_):
        total = add(x, y)
        normed = OPS.rms_norm(total, weight, eps=1e-5)
        return total + OPS.linear(normed, up)

    torch.manual_seed(0)
    values = {
        "x": torch.randn(8, 32),
        "y": torch.randn(8, 32),
        "weight": torch.rand(32),
        "up": torch.randn(32, 32),
    }
    return make_case(function, values)


def result_of(lowered):
    (found,) = [result for result in lowered.results if result.name == "fuse_add_rms_norm"]
    return found


def calls(lowered):
    return [str(node.target) for node in lowered.graph_module.graph.nodes]


@pytest.mark.parametrize("soc", ["ascend-a3", "ascend-950"])
def test_one_operator_gives_the_sum_and_its_norm(soc):
    case = residual_case()
    lowered = case.lower(soc)
    assert len(result_of(lowered).matches) == 1
    assert "npu.npu_add_rms_norm.default" in calls(lowered)
    assert "npu.npu_rms_norm.default" not in calls(lowered)
    torch.testing.assert_close(case.run(lowered)[0], case.eager()[0])


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (lambda x, y: torch.add(x, y, alpha=2), "scales"),
        (lambda x, y: x + y[:1], "broadcasts"),
        (lambda x, y: x + 1.0, "adds a number"),
    ],
)
def test_other_sums_stay(add, reason):
    case = residual_case(add)
    lowered = case.lower("ascend-950")
    (refusal,) = result_of(lowered).refusals
    assert reason in refusal.reason
    torch.testing.assert_close(case.run(lowered)[0], case.eager()[0])


@pytest.mark.skipif(stand_in.find_wheel() is None, reason="needs the torch-npu wheel")
def test_it_is_one_node_of_ge():
    lowered = residual_case().lower("ascend-950", torch.bfloat16)
    graph = ge.convert(
        lowered.graph_module, {}, soc="ascend-950", cann_version="9.0.0", name="residual"
    )
    assert graph.nodes["AddRmsNorm"] == 1
    assert "RmsNorm" not in graph.nodes
