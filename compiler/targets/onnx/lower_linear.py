"""Matrix products with a weight become `hybridge.linear`, which reads the weight as it is stored.

    aten.linear(x, weight)    ->    hybridge.linear(x, weight)

The exporter would write a Transpose of the weight, which a runtime folds into a second copy; and onnxruntime
has no bf16 product. Left alone: a product with a bias, and one whose second operand is computed.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from hybridge.ir.signature import is_weight


def lower_linear(gm: GraphModule) -> int:
    """Rewrite `gm` in place.

    Returns:
        How many products were lowered.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.aten.linear.default or node.kwargs:
            continue
        x, weight, *bias = node.args
        if any(item is not None for item in bias) or not is_weight(weight):
            continue
        node.target = torch.ops.hybridge.linear.default
        node.args = (x, weight)
        count += 1
    return count
