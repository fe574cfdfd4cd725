"""SiTU as the model spells it, with and without the linear bound, and near misses."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hybridge.compiler.targets.ascend.fuse_situ import fuse_situ
from hybridge.models.layers import situ

X = torch.randn(4, 8), torch.randn(4, 8)


def fused(function):
    gm = make_fx(function)(*X)
    result = fuse_situ(gm)
    torch.testing.assert_close(result(*X), gm(*X))
    return [str(n.target) for n in result.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_is_one_operator(linear_beta):
    assert fused(lambda g, u: situ(g, u, 4.0, linear_beta)) == ["hybridge.situ.default"]


@pytest.mark.parametrize(
    "function",
    [
        lambda g, u: 4.0 * torch.tanh(g / 3.0) * torch.sigmoid(g) * u,
        lambda g, u: 4.0 * torch.tanh(g / 4.0) * torch.sigmoid(u) * u,
        lambda g, u: 4.0 * torch.tanh(g / 4.0) + torch.sigmoid(g) * u,
        lambda g, u: (s := torch.sigmoid(g), 4.0 * torch.tanh(g / 4.0) * s * u),
    ],
    ids=["another bound", "another gate", "a sum", "a shared sigmoid"],
)
def test_what_only_looks_like_it_is_left_alone(function):
    assert "hybridge.situ.default" not in fused(function)
