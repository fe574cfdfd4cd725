"""What passes know about a graph's inputs: the metadata of a packed batch, caches and weights.

The names are those of the graph signature that every traced phase has; nothing here depends on a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

TOKEN_IDS = "token_ids"
QUERY_START = "query_start"
CONTEXT_LEN = "context_len"
SLOT_MAPPING = "slot_mapping"
BLOCK_TABLE = "block_table"
STATE_SLOT = "state_slot"
LOGITS_INDEX = "logits_index"

#: Integer inputs that describe the batch; every mask, length and gather index comes from these.
METADATA = (
    TOKEN_IDS,
    QUERY_START,
    CONTEXT_LEN,
    SLOT_MAPPING,
    BLOCK_TABLE,
    STATE_SLOT,
    LOGITS_INDEX,
)

PREFILL = "prefill"
DECODE = "decode"
PHASES = (PREFILL, DECODE)


def placeholders(graph: Graph) -> dict[str, Node]:
    """Every input by its name."""
    return {str(node.target): node for node in graph.nodes if node.op == "placeholder"}


def metadata(graph: Graph) -> dict[str, Node]:
    """The batch metadata that this graph has, by name."""
    found = placeholders(graph)
    return {name: found[name] for name in METADATA if name in found}


def mark_weights(gm: GraphModule, names: dict[str, str]) -> None:
    """Record which placeholders are weights.

    Args:
        gm: the graph.
        names: placeholder name -> the weight's own name.
    """
    for name, node in placeholders(gm.graph).items():
        if name in names:
            node.meta["weight"] = names[name]


def weight_name(node: Node) -> str | None:
    """The weight that a node holds: a marked placeholder or a get_attr; None for anything else."""
    if node.op == "get_attr":
        return str(node.target)
    return node.meta.get("weight") if node.op == "placeholder" else None


def is_weight(node: Node) -> bool:
    """Whether a node holds a weight."""
    return weight_name(node) is not None


def value_of(node: Node) -> Any:
    """The fake value that tracing recorded, or None."""
    return node.meta.get("val")


def shape_of(node: Node) -> tuple[Any, ...] | None:
    """The (symbolic) shape of a tensor node, or None."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a tensor node, or None."""
    value = value_of(node)
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_integer(node: Node) -> bool:
    """Whether a node holds indices, masks or sizes: nothing that carries activations."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return not (value.dtype.is_floating_point or value.dtype.is_complex)
    return isinstance(value, int | torch.SymInt | bool | torch.SymBool)
