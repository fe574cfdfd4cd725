"""Which layers' prologs become npu_mla_prolog_v3: those within its rules, where filling up heads pays."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import fx

from hybridge.compiler.targets.ascend.constraints import SOCS, padded_heads
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.compiler.targets.ascend.lowerings.mla_prolog import broken_rules
from hybridge.compiler.targets.ascend.prolog_sites import RULE, PrologSite, prolog_sites
from hybridge.ir.cost import Cost
from hybridge.ir.pass_base import Match, PassResult, Refusal

# What one operator replaces: three products and the absorption, two norms, two cache writes, and
# joining, padding and splitting the query. Each is a launch.
KERNELS_REPLACED = 11
BYTES = 2  # of a bf16 weight


@dataclass(frozen=True)
class Prologs:
    """The chosen sites, and the report of the choice."""

    sites: tuple[PrologSite, ...]
    result: PassResult


def choose_prologs(gm: fx.GraphModule, soc: str, bucket: Bucket) -> Prologs:
    """Sites of a fused graph that are to become one operator each; every other has a reason."""
    start = time.perf_counter()
    chosen: list[PrologSite] = []
    refusals: list[Refusal] = []
    for found in prolog_sites(gm):
        refusal = found if isinstance(found, Refusal) else _refusal(found, soc, bucket)
        if refusal is not None:
            refusals.append(refusal)
        elif isinstance(found, PrologSite):
            chosen.append(found)
    count = sum(node.op == "call_function" for node in gm.graph.nodes)
    matches = tuple(Match(site.query.name, ("npu_mla_prolog_v3",)) for site in chosen)
    result = PassResult(
        name=RULE,
        matches=matches,
        refusals=tuple(refusals),
        modified=bool(matches),
        nodes_before=count,
        nodes_after=count - sum(len(site.members) - 1 for site in chosen),
        bytes_removed=0,
        seconds=time.perf_counter() - start,
    )
    return Prologs(tuple(chosen), result)


def _refusal(site: PrologSite, soc: str, bucket: Bucket) -> Refusal | None:
    broken = broken_rules(site, soc, bucket.block_size)
    if broken:
        reasons = "; ".join(
            _in_short(each.rule.fact, each.found, each.rule.allowed) for each in broken
        )
        return Refusal(
            site.query.name,
            "operator's rules",
            f"MlaPrologV3: {reasons} ({broken[0].rule.source})",
            broken[0].rule.remedy,
        )
    seconds, launches = _padding(site, soc, bucket)
    if seconds <= launches:
        return None
    return Refusal(
        site.query.name,
        "padding does not pay",
        f"filling {site.heads} heads up to {padded_heads(site.heads)} costs "
        f"{seconds * 1e6:.0f} us at {bucket.tokens} tokens, {KERNELS_REPLACED} launches fewer save "
        f"{launches * 1e6:.0f} us",
        "none needed: its parts stay operators of their own",
    )


def _in_short(fact: str, found: object, allowed: object) -> str:
    return f"{fact} is {found}, must be {allowed}"


def _padding(site: PrologSite, soc: str, bucket: Bucket) -> tuple[float, float]:
    """Seconds that the added heads' weights take, and that the launches take which are saved."""
    machine = SOCS[soc].machine
    rank = int(site.query_down.meta["val"].shape[0])
    width = int(site.query_up.meta["val"].shape[0]) // site.heads
    latent = int(site.cache_gamma.meta["val"].shape[0])
    elements = (padded_heads(site.heads) - site.heads) * (rank * width + site.nope * latent)
    work = Cost(cube=2.0 * bucket.tokens * elements, bytes=float(BYTES * elements))
    added = machine.seconds(work) - machine.launch if elements else 0.0
    return added, KERNELS_REPLACED * machine.launch
