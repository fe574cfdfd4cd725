"""Random graphs of model parts with noise in them, one a seed; `python tests/passes/random_graphs.py` runs thousands.

A graph is one of a few compositions of parts (KDA, sparse or dense MLA, experts, SiTU, AttnRes, norms), each in some
spelling, with noise at random places: views there and back, copies, casts, extra users, writes, changed constants.
Noise may hide a fusion or forbid one; the passes may do with it what they like, as long as the graph computes the same.
Results are compared in fp64, so that nothing has to be forgiven as rounding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

import hybridge.ops
from hybridge.compiler.pipeline import PIPELINE
from hybridge.ir.derived import materialise
from hybridge.ir.effects import Effects
from hybridge.ir.pass_base import PassContext, fake_result, run_pass
from hybridge.ir.signature import is_weight, weight_name
from hybridge.ir.spec import violations
from kda_graphs import PlainKda, inputs_of
from plain_maths import (
    BLOCK,
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    VALUE,
    WIDTH,
    ExpandedAttention,
    PlainAttention,
    PlainIndexer,
    PlainMix,
    PlainResiduals,
    batch,
    copied,
    export,
)

assert hybridge.ops is not None

aten = torch.ops.aten
D = 12  # of PlainKda
EXPERTS, KEPT = 5, 2
COMPOSITIONS = 24
GRAPHS_OF_ONE = 10  # seeds in a row that share a composition, so that few need an export
# Both graphs run in fp64: what differs more than sums in another order is wrong.
TOLERANCE = 1e-9
PROOFS: dict[str, Any] = {}


# ---- Parts ----------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.form = choose.choice(("root", "divide", "whole", "einsum"))
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "whole":
            return torch.nn.functional.rms_norm(x, (D,), self.weight, 1e-5)
        if self.form == "divide":
            return self.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        if self.form == "einsum":
            mean = torch.einsum("td,td->t", x, x) / D
            return torch.rsqrt(mean + 1e-5).unsqueeze(1) * x * self.weight
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Mlp(nn.Module):
    """SiTU between two projections."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.form = choose.choice(("plain", "scaled", "sigmoid"))
        self.gate, self.up = (nn.Parameter(torch.randn(8, D)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(D, 8))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x @ self.gate.T, torch.nn.functional.linear(x, self.up)
        if self.form == "scaled":
            inner = 4.0 * (gate * 0.25).tanh() * (gate.sigmoid() * (up / 25.0).tanh() * 25.0)
        elif self.form == "sigmoid":
            bounded = 50.0 * torch.sigmoid(up * 0.08) - 25.0
            inner = (8.0 * torch.sigmoid(gate / 2.0) - 4.0) * torch.sigmoid(gate) * bounded
        else:
            bounded = 25.0 * torch.tanh(up / 25.0)
            inner = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * bounded
        return inner @ self.down.T


class Moe(nn.Module):
    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.form = choose.choice(("sort", "argsort"))
        shapes = ((EXPERTS, D), (EXPERTS,), (EXPERTS, 4, D), (EXPERTS, D, 2))
        self.gate, self.bias, self.gate_up, self.down = (
            nn.Parameter(torch.randn(shape)) for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sigmoid(torch.nn.functional.linear(x, self.gate))
        biased = scores + self.bias
        if self.form == "sort":
            order = torch.sort(biased, dim=-1, descending=True, stable=True).indices
        else:
            order = torch.argsort(-biased, stable=True)
        weights = scores.gather(1, order[:, :KEPT])
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        result: Tensor = torch.ops.hybridge.moe_experts(
            x, order[:, :KEPT].int(), weights, self.gate_up, self.down,
            activation="silu", beta=4.0, linear_beta=None,
        )  # fmt: skip
        return result


class Attention(nn.Module):
    """Projections around the sparse or dense attention of `plain_maths`."""

    def __init__(self, phase: str, choose: random.Random, sparse: bool) -> None:
        super().__init__()
        self.sparse = sparse
        expanded = choose.random() < 0.5
        if expanded:
            forms = ("one weight", "keys first", "two weights", "parts")
            self.attend: nn.Module = ExpandedAttention(phase, sparse, choose.choice(forms))
        else:
            form = choose.choice(("exp", "softmax", "early"))
            self.attend = PlainAttention(phase, sparse, form=form)
        query, value = (NOPE + ROPE, VALUE) if expanded else (LATENT + ROPE, LATENT)
        self.query = nn.Parameter(torch.randn(HEADS * query, D))
        self.out = nn.Parameter(torch.randn(D, HEADS * value))
        self.row = nn.Parameter(torch.randn(LATENT + ROPE, D))
        if sparse:
            self.indexer = PlainIndexer(phase, form=choose.choice(("einsum", "bmm")))
            self.indexer_query = nn.Parameter(torch.randn(HEADS * WIDTH, D))
            self.head_weights = nn.Parameter(torch.randn(HEADS, D))

    def forward(self, x: Tensor, latent: Tensor, keys: Tensor, tables: list[Tensor]) -> Tensor:
        *where, slots = tables
        row = torch.nn.functional.linear(x, self.row)
        torch.ops.hybridge.paged_write(latent, row.unsqueeze(1), slots)
        query = (x @ self.query.T).unflatten(1, (HEADS, -1))
        positions = None
        if self.sparse:
            wanted = (x @ self.indexer_query.T).view(-1, HEADS, WIDTH)
            positions = self.indexer(wanted, x @ self.head_weights.T, keys, *where)
        return self.attend(query, latent, *where, positions).flatten(1) @ self.out.T


# KDA, the dearest to prove, is in few.
PARTS = ("sparse", "dense", "moe", "mlp", "moe", "mlp", "norm", "norm")
KDA_EVERY = 8


class Composition(nn.Module):
    """One to three parts in a row, each behind a norm; plain residuals, or a mix of all sources so far."""

    def __init__(self, phase: str, choose: random.Random, with_kda: bool) -> None:
        super().__init__()
        self.kinds = choose.sample(PARTS, choose.choice((1, 1, 2, 2, 3)))
        if with_kda:
            self.kinds = choose.sample(["kda", self.kinds[0]], 2)
        if {"sparse", "dense"} <= set(self.kinds):  # they would write the same cache
            self.kinds.remove("dense")
        makers = {
            "kda": lambda: PlainKda(
                phase,
                form=choose.choice(("", "three", "conv1d joint")),
                bounded=choose.random() < 0.5,
            ),
            "sparse": lambda: Attention(phase, choose, True),
            "dense": lambda: Attention(phase, choose, False),
            "moe": lambda: Moe(choose),
            "mlp": lambda: Mlp(choose),
            "norm": lambda: Norm(choose),
        }
        self.parts = nn.ModuleList(makers[kind]() for kind in self.kinds)
        self.norms = nn.ModuleList(Norm(choose) for _ in self.kinds)
        self.mix = (
            PlainMix(D, form=choose.choice(("stack", "cat"))) if choose.random() < 0.5 else None
        )
        self.residuals = PlainResiduals(width=D) if choose.random() < 0.3 else None

    def forward(
        self,
        x: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        state_slot: Tensor,
        latent_cache: Tensor,
        indexer_cache: Tensor,
        conv_state: Tensor,
        kda_state: Tensor,
    ) -> Any:
        sources, hidden = [x], x
        tables = [query_start, context_len, block_table, slot_mapping]
        states = [query_start, context_len, state_slot, conv_state, kda_state]
        for kind, part, norm in zip(self.kinds, self.parts, self.norms, strict=True):
            normed = norm(hidden)
            if kind == "kda":
                result = part(normed, *states)
            elif kind in ("sparse", "dense"):
                result = part(normed, latent_cache, indexer_cache, tables)
            else:
                result = part(normed)
            sources.append(result)
            hidden = hidden + result
        more = () if self.residuals is None else self.residuals(x, sources[1], hidden, normed)
        if self.mix is None:
            return hidden, *more
        return self.mix._mix([*sources, hidden], "first"), hidden, *more


def inputs_for(phase: str) -> dict[str, Tensor]:
    """Values of every input of a composition; no padding, whose rows no op defines."""
    example, generator = batch(phase, padding=0), torch.Generator().manual_seed(1)
    tables = example.inputs()
    names = ("query_start", "context_len", "block_table", "slot_mapping", "state_slot")
    pages = (example.blocks, BLOCK, 1)
    states = inputs_of(phase)
    return {
        "x": torch.randn(example.tokens, D, generator=generator),
        **{name: tables[name] for name in names},
        "latent_cache": torch.randn(*pages, LATENT + ROPE, generator=generator),
        "indexer_cache": torch.randn(*pages, WIDTH, generator=generator),
        "conv_state": states["conv_state"],
        "kda_state": states["kda_state"],
    }


@cache
def composed(place: int) -> tuple[str, GraphModule]:
    """(phase, graph) of one composition."""
    choose = random.Random(place)
    phase = choose.choice(("prefill", "decode"))
    torch.manual_seed(place)
    module = Composition(phase, choose, with_kda=place % KDA_EVERY == 0)
    for parameter in module.parameters():
        # A product of two that a pass derives, in fp32, is then exact.
        parameter.data = parameter.data.bfloat16().float()
    return phase, export(module, phase, inputs_for(phase))


# ---- Noise ----------------------------------------------------------------------------------------


class Noise:
    """Puts nodes into a graph, after a node or in its place; `kinds` tells what."""

    def __init__(self, gm: GraphModule, choose: random.Random) -> None:
        self.gm, self.choose = gm, choose
        self.kinds: list[str] = []

    def add(self) -> None:
        every = (
            "round_trip",
            "round_trip",
            "cast",
            "second_user",
            "write",
            "new_table",
            "constant",
        )
        kind = self.choose.choice(every)
        self.kinds.append(kind)
        getattr(self, f"_{kind}")()

    def _floats(self, op: str = "call_function") -> list[Node]:
        return [
            node
            for node in self.gm.graph.nodes
            if node.op == op
            and isinstance(node.meta.get("val"), Tensor)
            and node.meta["val"].is_floating_point()
            and "weight" not in node.meta
        ]

    def _call(self, before: Node, target: Any, *args: Any) -> Node:
        with self.gm.graph.inserting_before(before):
            node = self.gm.graph.call_function(target, args)
        node.meta["val"] = fake_result(node)
        return node

    def _after(self, node: Node, *steps: tuple[Any, ...]) -> None:
        """Put calls (target, arguments after the first) between a node and its users."""
        users, place = list(node.users), node.next
        result = node
        for target, *args in steps:
            result = self._call(place, target, result, *args)
        for user in users:
            user.replace_input_with(node, result)

    def _round_trip(self) -> None:
        """A value goes through ops that give it back."""
        node = self.choose.choice(self._floats())
        last = node.meta["val"].dim() - 1
        trips: list[list[tuple[Any, ...]]] = [
            [(aten.unsqueeze.default, 0), (aten.squeeze.dim, 0)],
            [(aten.clone.default,)],
            [(aten.mul.Tensor, 1.0)],
            [(aten.to.dtype, torch.float64), (aten.to.dtype, torch.float32)],
            [(aten.neg.default,), (aten.neg.default,)],
        ]
        if last > 0:
            trips += [[(aten.transpose.int, 0, last)] * 2]
        self._after(node, *self.choose.choice(trips))

    def _cast(self) -> None:
        """A value is rounded to bf16."""
        node = self.choose.choice(self._floats())
        self._after(node, (aten.to.dtype, torch.bfloat16), (aten.to.dtype, torch.float32))

    def _second_user(self) -> None:
        """A value is also a result, after some maths."""
        node = self.choose.choice(self._floats())
        output = next(iter(reversed(self.gm.graph.nodes)))
        extra = self._call(output, aten.mul.Tensor, node, 0.5)
        output.args = ((*output.args[0], extra),)

    def _write(self) -> None:
        """An input, or a value of the graph, is scaled in place somewhere."""
        body = [node for node in self.gm.graph.nodes if node.op == "call_function"]
        where = self.choose.choice(body)
        values = self._floats("placeholder")
        if self.choose.random() < 0.3:
            effects = Effects(self.gm.graph)
            own = (node for node in self._floats() if _may_write(node, where, effects))
            values = list(own) or values
        self._call(where, aten.mul_.Tensor, self.choose.choice(values), 0.5)

    def _new_table(self) -> None:
        """From somewhere on the batch is another one: no tokens before, or every page the first."""
        body = [node for node in self.gm.graph.nodes if node.op == "call_function"]
        names = ("context_len", "block_table")
        tables = [node for node in self.gm.graph.nodes if node.name in names]
        self._call(self.choose.choice(body), aten.zero_.default, self.choose.choice(tables))

    def _constant(self) -> None:
        """A number in the maths is another one."""
        found = [
            (node, place)
            for node in self._floats()
            for place, value in enumerate(node.args)
            if isinstance(value, float) and abs(value) < 1e6
        ]
        if found:
            node, place = self.choose.choice(found)
            node.update_arg(place, node.args[place] * self.choose.choice((0.5, 2.0, -1.0)))


def _may_write(node: Node, where: Node, effects: Effects) -> bool:
    """Whether there is a value, not a weight's, of which no element lies in memory twice."""
    dense = all(stride != 0 for stride in node.meta["val"].stride())
    return node < where and dense and not any(map(is_weight, effects.roots(node)))


# ---- One graph ------------------------------------------------------------------------------------


class InFp64(Interpreter):
    """Runs a graph with every fp32 as fp64."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        wide = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return super().call_function(target, args, wide)


def results(gm: GraphModule, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Outputs, then the inputs after the run, in fp64."""
    recipes, weights = gm.meta.get("derived_weights", {}), gm.meta["values"]
    values = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            name = weight_name(node)
            held = inputs[str(node.target)] if name is None else None
            value = materialise(name, recipes, weights.__getitem__) if held is None else held
            values.append(value.double() if value.is_floating_point() else value.clone())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            outputs = InFp64(gm).run(*values)
    finally:
        torch.set_default_dtype(torch.float32)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    states = [v for n, v in zip(nodes, values, strict=True) if weight_name(n) is None]
    return [*torch.utils._pytree.tree_leaves(outputs), *states]


@dataclass(frozen=True)
class Outcome:
    """What the passes did to one graph: matches and refusals by pass, and on the graph without noise."""

    seed: int
    noise: tuple[str, ...]
    matches: Counter[str]
    refusals: Counter[str]
    possible: Counter[str]

    @staticmethod
    def fusions(counts: Counter[str]) -> Counter[str]:
        """Without the passes that only tidy up."""
        return Counter({name: n for name, n in counts.items() if name.startswith("fuse") and n})


@cache
def possible(place: int) -> Counter[str]:
    """Matches by pass without noise."""
    phase, original = composed(place)
    return _run_passes(copied(original), phase)[0]


def _run_passes(gm: GraphModule, phase: str) -> tuple[Counter[str], Counter[str]]:
    matches: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for step in PIPELINE:
        done = run_pass(step, PassContext(gm, phase, PROOFS))
        matches[step.name] += len(done.matches)
        refusals[step.name] += len(done.refusals)
        found = violations(gm)
        assert not found, f"after {step.name}: {found}"
    return matches, refusals


def check(seed: int) -> Outcome:
    """Make the seed's graph, run the passes, compare.

    Raises:
        AssertionError: the results differ. Anything else: a pass failed.
    """
    choose = random.Random(seed)
    place = seed // GRAPHS_OF_ONE % COMPOSITIONS
    phase, original = composed(place)
    gm, inputs = copied(original), inputs_for(phase)
    noise = Noise(gm, choose)
    for _ in range(choose.randrange(4)):
        noise.add()
    gm.recompile()
    before = results(gm, inputs)
    matches, refusals = _run_passes(gm, phase)
    for number, (old, new) in enumerate(zip(before, results(gm, inputs), strict=True)):
        assert old.dtype == new.dtype, f"value {number} was {old.dtype}, is {new.dtype}"
        torch.testing.assert_close(new, old, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return Outcome(seed, tuple(noise.kinds), matches, refusals, possible(place))


# ---- Many graphs ----------------------------------------------------------------------------------


def attempt(seed: int) -> tuple[int, Outcome | None, str]:
    """(seed, what happened, or None and the error)."""
    try:
        return seed, check(seed), ""
    except Exception:
        return seed, None, traceback.format_exc(limit=-4)


def _start_worker() -> None:
    torch.set_num_threads(1)


def _finished(log: Path) -> set[int]:
    lines = log.read_text().splitlines() if log.exists() else []
    return {int(line.split()[1]) for line in lines if line.startswith("ok ")}


def _attempts(seeds: list[int], workers: int) -> Iterator[tuple[int, Outcome | None, str]]:
    if workers == 1:
        yield from map(attempt, seeds)
        return
    # A worker gets the graphs of one composition, which it exports once.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker) as pool:
        yield from pool.imap_unordered(attempt, seeds, chunksize=GRAPHS_OF_ONE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000, help="seeds to run")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--log", type=Path, help="a file to resume from: seeds that are ok in it are left out"
    )
    chosen = parser.parse_args()
    done = _finished(chosen.log) if chosen.log else set()
    seeds = [s for s in range(chosen.first, chosen.first + chosen.count) if s not in done]
    print(f"{len(seeds)} graphs to run, {len(done)} were ok before", flush=True)
    failed: list[int] = []
    matches: Counter[str] = Counter()
    likely: Counter[str] = Counter()
    for total, (seed, outcome, error) in enumerate(_attempts(seeds, chosen.workers), start=1):
        if outcome is None:
            failed.append(seed)
            print(f"seed {seed} failed:\n{error}", flush=True)
            continue
        matches += outcome.fusions(outcome.matches)
        likely += outcome.fusions(outcome.possible)
        if chosen.log:
            with chosen.log.open("a") as log:
                log.write(f"ok {seed}\n")
        if total % 100 == 0:
            print(f"{total} of {len(seeds)}, {len(failed)} failed", flush=True)
    for name in sorted(likely):
        print(f"{name}: {matches[name]} fused of {likely[name]} that do without noise")
    print(f"{len(seeds)} graphs, {len(failed)} failed {failed or ''}")
    vacuous = bool(seeds) and matches.total() <= likely.total() / 2
    return 1 if failed or vacuous else 0


if __name__ == "__main__":
    sys.exit(main())
