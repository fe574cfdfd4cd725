"""Experts over several devices: which experts a device holds, and what of the weights.

Rank r of N holds the experts [r E/N, (r + 1) E/N); everything else is whole on each device, which computes
its own rows (data parallel). Rows travel to their experts and back by two operators that are collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from hybridge.artifacts.errors import UsageError
from hybridge.compiler.targets.ascend.prepared_weights import PreparedWeight
from hybridge.ops.registry import find

GROUP = "ep"
# Vocabulary op -> its arguments whose first axis is the experts.
_BY_EXPERT = {
    "moe_experts": ("gate_up", "down"),
    "moe_experts_mxfp4": ("gate_up_packed", "gate_up_scale", "down_packed", "down_scale"),
}


@dataclass(frozen=True)
class ExpertParallel:
    """One device's place among those that share the experts.

    Attributes:
        devices: how many. rank: this one's place. group: name of their communication group.
    """

    devices: int = 1
    rank: int = 0
    group: str = GROUP

    def __post_init__(self) -> None:
        """Raises UsageError where there is no such place."""
        if self.devices < 1 or not 0 <= self.rank < self.devices:
            raise UsageError(
                f"rank {self.rank} of {self.devices} devices that share the experts",
                "give a number of devices from 1, and a rank from 0 below it",
            )

    def own(self, experts: int) -> slice:
        """The experts of this device.

        Raises:
            UsageError: the experts cannot be shared evenly.
        """
        if experts % self.devices:
            raise UsageError(
                f"{experts} experts over {self.devices} devices leave {experts % self.devices} over",
                "choose a number of devices that divides the experts",
            )
        count = experts // self.devices
        return slice(self.rank * count, (self.rank + 1) * count)


def expert_weights(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The weights of a fused graph that have an axis of experts."""
    for node in gm.graph.nodes:
        op = find(node.target)
        if op is None or op.name not in _BY_EXPERT:
            continue
        for name in _BY_EXPERT[op.name]:
            found = node.args[op.tensor_arguments.index(name)]
            assert isinstance(found, fx.Node)
            yield found


def own_part(weight: PreparedWeight, parallel: ExpertParallel) -> PreparedWeight:
    """A weight of all experts as this device holds it."""
    own = parallel.own(weight.shape[0])
    cut = ("aten.slice.Tensor", (0, own.start, own.stop), ())
    shape = (own.stop - own.start, *weight.shape[1:])
    return PreparedWeight(
        weight.name,
        weight.source,
        shape,
        weight.dtype,
        (*weight.steps, cut),
        weight.scale_source,
    )
