"""Which KDA layers the MegaKDA kernel could take whole, and by which rule it cannot.

`mega_recurrent_kda` is a Python kernel of the cannbot DSL for one shape: 8 tokens (7 drafts and the token
before them) of each of 16 to 256 sequences, hidden size 7168, six heads of 128. These models have 96 heads
(or 32), so six a device mean 16 devices in tensor parallel, and a decode graph here has one token a
sequence. A layer that breaks any rule keeps its operators; each rule that it breaks is told.
"""

from __future__ import annotations

import time

from torch import fx

from hybridge.compiler.targets.ascend.constraints import violations
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.ir.pass_base import PassResult, Refusal
from hybridge.ops.registry import find

NAME, OPERATOR = "fuse_mega_kda", "MegaRecurrentKda"
_NO_KERNEL = "the kernel is of the cannbot DSL for Ascend 950, and no operator of GE"


def mega_kda_result(gm: fx.GraphModule, soc: str, bucket: Bucket) -> PassResult:
    """A refusal a decode layer, with every rule of the kernel that it breaks."""
    start = time.perf_counter()
    refusals = []
    for node in gm.graph.nodes:
        op = find(node.target)
        if op is not None and op.name == "kda_decode":
            refusals.append(_refusal(node, soc, bucket))
    count = sum(node.op == "call_function" for node in gm.graph.nodes)
    took = time.perf_counter() - start
    return PassResult(NAME, (), tuple(refusals), False, count, count, 0, took)


def _refusal(node: fx.Node, soc: str, bucket: Bucket) -> Refusal:
    hidden = int(node.args[0].meta["val"].shape[-1])  # type: ignore[union-attr]
    heads = int(node.args[5].meta["val"].shape[0])  # type: ignore[union-attr]
    value = int(node.args[7].meta["val"].shape[0])  # type: ignore[union-attr]
    broken = violations(
        node.name,
        OPERATOR,
        soc,
        {
            "batch": bucket.sequences,
            "tokens a sequence": bucket.tokens // bucket.sequences,
            "heads": heads,
            "hidden size": hidden,
            "head dimension": value,
        },
    )
    reasons = [f"{each.rule.fact} is {each.found}, must be {each.rule.allowed}" for each in broken]
    remedies = dict.fromkeys(each.rule.remedy for each in broken)
    return Refusal(
        node.name,
        "MegaKDA's rules",
        "; ".join([*reasons, _NO_KERNEL]),
        "; ".join(remedies) or "none needed: its parts stay operators of their own",
    )
