"""What a pass is, and what the framework checks for it.

A pass says three things apart: `pattern` finds sites, `check` gives a reason not to touch one, `rewrite` makes the
new nodes. The framework does the rest, the same for every pass: it refuses a site whose intermediates someone else
uses or whose accesses an effect separates, replaces and erases nodes, fills in metadata, and verifies that effects,
dtypes and shapes are what they were.
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from hybridge.artifacts.errors import CompileError
from hybridge.ir import region as regions
from hybridge.ir.cost import traced_bytes
from hybridge.ir.derived import Recipe, apply_recipe
from hybridge.ir.effects import Effects, has_effect, is_assertion, is_view, written_arguments
from hybridge.ir.region import Region
from hybridge.ir.signature import is_weight, placeholders, value_of


class ModelShape(Protocol):
    """The part of a model's config that expected match counts are computed from."""

    @property
    def layer_kinds(self) -> tuple[str, ...]: ...

    @property
    def attn_res_block_size(self) -> int | None: ...

    @property
    def activation(self) -> str: ...

    def is_moe_layer(self, layer: int) -> bool: ...

    def has_mlp(self, layer: int) -> bool: ...


@dataclass(frozen=True)
class Refusal:
    """A site that looked right and was left alone.

    Args:
        node: the site's anchor.
        rule: the rule that it breaks, in a few words; the same words for the same rule.
        reason: what was found there, naming nodes.
        remedy: what would make it fuse.
    """

    node: str
    rule: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.node}: {self.rule}: {self.reason} (remedy: {self.remedy})"


@dataclass(frozen=True)
class Match:
    """A site that was rewritten: its anchor, and the new nodes with their ops."""

    node: str
    replacement: tuple[str, ...]


@dataclass(frozen=True)
class PassResult:
    """What one pass did to one graph.

    Args:
        name: of the pass. matches, refusals: every site that it found.
        expected: matches that the model's config calls for.
        modified: whether the graph changed.
        nodes_before, nodes_after: calls in the graph.
        bytes_removed: bytes of intermediates that no longer exist, at the sizes of the traced example.
        moved_before, moved_after: bytes of intermediates that the graph's calls read and write, at these sizes (see
            `hybridge.ir.cost.bytes_moved`); filled by the pipeline.
        seconds: time it took.
        dumps, difference: filled by the pipeline on request.
    """

    name: str
    matches: tuple[Match, ...]
    refusals: tuple[Refusal, ...]
    modified: bool
    nodes_before: int
    nodes_after: int
    bytes_removed: int
    seconds: float
    expected: int = 0
    moved_before: int = 0
    moved_after: int = 0
    difference: float | None = None


@dataclass(frozen=True)
class Site:
    """A place where a pass may rewrite.

    Args:
        anchor: the node that the site is named after.
        region: what would be replaced.
        reads: what the new nodes read beside weights. Empty where these are the region's own inputs; a pass names
            the values where the op takes what these inputs are made from.
        earlier: read -> the node that reads it, for a read by a stage that several sites share and that lies before
            this one.
        detail: whatever else the pass found out, for its own `check` and `rewrite`.
    """

    anchor: Node
    region: Region
    reads: tuple[Node, ...] = ()
    earlier: Mapping[Node, Node] = field(default_factory=dict)
    detail: Any = None


class Pass(ABC):
    """One rewrite of a graph. Subclasses are stateless; one instance serves many graphs."""

    #: The step's name: of the dump file and in every message.
    name: ClassVar[str]

    #: Passes that make what this one rewrites: without one of them it has nothing to match, and none is expected.
    needs: ClassVar[tuple[str, ...]] = ()

    def expect(self, config: ModelShape, phase: str) -> int:
        """The least number of matches in a graph of this model's phase."""
        return 0

    @abstractmethod
    def pattern(self, context: PassContext) -> Iterable[Site | Refusal]:
        """The sites of the graph, and refusals of near misses that the pattern itself can explain."""

    @abstractmethod
    def check(self, site: Site, context: PassContext) -> Refusal | None:
        """Why a site must be left alone, or None."""

    @abstractmethod
    def rewrite(self, site: Site, rewriter: Rewriter) -> Mapping[Node, Node]:
        """Make the new nodes; returns region output -> replacement, for every output that is a value."""


class PassContext:
    """The graph that a pass works on, with what the framework knows about it.

    Args:
        gm: the graph module.
        phase: "prefill" or "decode".
        proofs: verdicts by region text, shared by the passes of one compilation.
    """

    def __init__(self, gm: GraphModule, phase: str, proofs: dict[str, Any] | None = None) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.phase = phase
        self.effects = Effects(gm.graph)
        self.proofs = {} if proofs is None else proofs


class Rewriter:
    """Makes nodes at one place of a graph, with metadata.

    Args:
        context: of the pass.
        point: new nodes go before this node.
    """

    def __init__(self, context: PassContext, point: Node) -> None:
        self.context = context
        self.point = point
        self.created: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of an overload, with its fake value computed from the arguments' values."""
        with self.context.graph.inserting_before(self.point):
            node = self.context.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_result(node)
        self.created.append(node)
        self.context.effects.add(node)
        return node

    def item(self, node: Node, place: int) -> Node:
        """One of the values that a call returns."""
        with self.context.graph.inserting_before(self.point):
            item = self.context.graph.call_function(operator.getitem, (node, place))
        item.meta["val"] = value_of(node)[place]
        self.created.append(item)
        self.context.effects.add(item)
        return item

    def derive(self, name: str, recipe: Recipe) -> str:
        """Record how to make a weight from others; returns its name. Two recipes never share one."""
        table = self.context.gm.meta.setdefault("derived_weights", {})
        if table.setdefault(name, recipe) != recipe:
            raise CompileError(
                f"derived weight {name}: two passes give it different recipes",
                "this is a bug in the later pass: name the weight after what it is made from",
            )
        return name

    def derived_weight(self, name: str, recipe: Recipe, sources: Sequence[Node]) -> Node:
        """A weight made from others at compile time, as an input of the graph.

        Args:
            name: of the new weight.
            recipe: how to make it; see `hybridge.ir.derived`.
            sources: nodes of the recipe's inputs, for shape and dtype.
        """
        self.derive(name, recipe)
        graph = self.context.graph
        target = name.replace(".", "_")
        existing: Node | None = placeholders(graph).get(target)
        if existing is not None:
            return existing
        values = [value_of(source) for source in sources]
        mode = _fake_mode(values)
        with mode if mode is not None else nullcontext():
            value = apply_recipe(recipe, values)
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.placeholder(target)
        node.meta["val"], node.meta["weight"] = value, name
        self.context.effects.add(node)
        return node


def fake_result(node: Node) -> Any:
    """Run a call on the fake values of its arguments."""
    args = map_arg(node.args, value_of)
    kwargs = map_arg(node.kwargs, value_of)
    mode = _fake_mode(args, kwargs)
    if mode is None:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _fake_mode(*values: Any) -> Any:
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
    return None


def run_pass(step: Pass, context: PassContext) -> PassResult:
    """Apply one pass to one graph.

    Raises:
        CompileError: the pass broke a promise: an effect, a dtype or shape, or nodes left behind.
    """
    start = time.perf_counter()
    before = _count(context.gm)
    matches: list[Match] = []
    refusals: list[Refusal] = []
    removed = 0
    for found in step.pattern(context):
        if isinstance(found, Refusal):
            refusals.append(found)
            continue
        refusal = step.check(found, context) or hazard(found, context)
        if refusal is not None:
            refusals.append(refusal)
            continue
        match, saved = _apply(step, found, context)
        matches.append(match)
        removed += saved
    if matches:
        _sweep(context)
        context.gm.recompile()
    return PassResult(
        name=step.name,
        matches=tuple(matches),
        refusals=tuple(refusals),
        modified=bool(matches),
        nodes_before=before,
        nodes_after=_count(context.gm),
        bytes_removed=removed,
        seconds=time.perf_counter() - start,
    )


def _sweep(context: PassContext) -> None:
    """Erase what the rewrites left without a user."""
    for node in reversed(list(context.graph.nodes)):
        if node.op == "call_function" and not is_assertion(node) and regions.is_idle(node):
            regions.erase([node], context.effects.forget)


def _count(gm: GraphModule) -> int:
    return sum(node.op == "call_function" for node in gm.graph.nodes)


def hazard(site: Site, context: PassContext) -> Refusal | None:
    """The rules that every region obeys, whatever is in it; `run_pass` applies them to every site."""
    region, anchor = site.region, site.anchor.name
    shared = regions.escapes(region)
    if shared is not None:
        intermediate, user = shared
        return Refusal(
            anchor,
            "shared intermediate",
            f"{intermediate.name} is used outside of the region, by {user.name}",
            f"let {user.name} compute its own copy, or drop that use",
        )
    random = regions.first_random(region)
    if random is not None:
        return Refusal(
            anchor,
            "random op",
            f"{random.name} draws random numbers",
            "trace the model in evaluation mode",
        )
    stray = _write_to_outside(region, context)
    if stray is not None:
        write, owner = stray
        return Refusal(
            anchor,
            "write to a value from outside",
            f"{write.name} writes {owner.name}, which is made before the region and is no input of the graph",
            f"let {write.name} write a copy",
        )
    point = regions.insertion_point(region)
    late = [node for node in (*region.inputs, *site.reads) if not node < point]
    if late:
        return Refusal(
            anchor,
            "output used too early",
            f"{point.name} uses an output before {late[0].name} is computed",
            f"use the output after {late[0].name}",
        )
    return _separated(site, point, context)


def _write_to_outside(region: Region, context: PassContext) -> tuple[Node, Node] | None:
    """(write, storage) where a region writes a tensor that it does not make: fused ops write inputs only."""
    inside = set(region.nodes)
    for write in region.writes:
        for owner in sorted(context.effects.written_inputs(write)):
            if owner not in inside and owner.op == "call_function":
                return write, owner
    return None


def _separated(site: Site, point: Node, context: PassContext) -> Refusal | None:
    """Why the new nodes cannot read and write at `point` what is read and written before, or None."""
    found = regions.conflict(site.region, point, context.effects, site.reads, site.earlier)
    if found is None:
        return None
    return Refusal(
        site.anchor.name,
        f"{found.kind} between",
        f"{found.other.name} {'writes' if found.kind == 'write' else 'reads'} {found.storage.name} "
        f"between {found.access.name} and {point.prev.name}",
        f"move {found.other.name} before {found.access.name} or after {point.prev.name}",
    )


def _apply(step: Pass, site: Site, context: PassContext) -> tuple[Match, int]:
    region = site.region
    rewriter = Rewriter(context, regions.insertion_point(region))
    written = _written(region.nodes, context)
    replacements = step.rewrite(site, rewriter)
    kept = set(replacements.values())
    saved = _bytes(node for node in region.nodes if node not in kept)
    now = _written(rewriter.created, context)
    if set(now) != set(written) or len(now) > len(written):
        raise _broken(step, site, "writes other inputs than the region that it replaces")
    unnamed = _unnamed_read(site, rewriter.created)
    if unnamed is not None:
        raise _broken(step, site, f"reads {unnamed.name}, which its site does not name")
    for old, new in replacements.items():
        _same_value(step, site, old, new)
        old.replace_all_uses_with(new)
    left = regions.erase(
        [node for node in region.nodes if node not in kept], context.effects.forget
    )
    if left:
        raise _broken(step, site, f"leaves {left[0].name}, which is still used")
    regions.erase_unused(
        [node for node in region.inputs if node.op != "placeholder"], context.effects.forget
    )
    missing = [node for node in rewriter.created if "val" not in node.meta]
    if missing:
        raise _broken(step, site, f"makes {missing[0].name} without metadata")
    saved -= _bytes(rewriter.created)
    ops = tuple(node.name for node in rewriter.created)
    return Match(site.anchor.name, ops), saved


def _written(nodes: Iterable[Node], context: PassContext) -> list[str]:
    """The names of the storages that nodes write to, one a write; writes to their own tensors do not count."""
    inside = set(nodes)
    owners: list[str] = []
    for node in inside:
        if not written_arguments(node):
            continue
        owners += [
            owner.name for owner in context.effects.written_inputs(node) if owner not in inside
        ]
    return sorted(owners)


def _unnamed_read(site: Site, created: Sequence[Node]) -> Node | None:
    """A value that new nodes read, and that `hazard` could not look at."""
    known = {*created, *(site.reads or site.region.inputs)}
    read = (argument for node in created for argument in node.all_input_nodes)
    return next((each for each in read if each not in known and not is_weight(each)), None)


def _same_value(step: Pass, site: Site, old: Node, new: Node) -> None:
    before, after = value_of(old), value_of(new)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return
    if before.dtype != after.dtype:
        raise _broken(step, site, f"changes {old.name} from {before.dtype} to {after.dtype}")
    if not same_shape(tuple(before.shape), tuple(after.shape)):
        raise _broken(step, site, f"changes {old.name} from {before.shape} to {after.shape}")


def same_shape(left: Iterable[Any], right: Iterable[Any]) -> bool:
    """Whether two symbolic shapes are the same expressions."""
    left, right = tuple(left), tuple(right)
    return len(left) == len(right) and all(map(same_size, left, right))


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are the same number or the same expression; adds no guard."""
    first = left.node.expr if isinstance(left, torch.SymInt) else left
    second = right.node.expr if isinstance(right, torch.SymInt) else right
    return bool(first == second)


def _broken(step: Pass, site: Site, what: str) -> CompileError:
    return CompileError(
        f"{step.name} at {site.anchor.name}: the rewrite {what}",
        f"this is a bug in the pass; compile without {step.name} and report it",
    )


def _bytes(nodes: Iterable[Node]) -> int:
    """Bytes that the nodes' results take; views and writes take none."""
    return sum(
        traced_bytes(value_of(node))
        for node in nodes
        if node.op == "call_function" and not is_view(node) and not has_effect(node)
    )
