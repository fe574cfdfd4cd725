"""Decide which weights lie in FRACTAL_NZ: where a rule of the hardware allows it and it pays.

    mm(x, t(w))    w [N, K] bf16, whole                    ->  w in FRACTAL_NZ
    bmm(q, view(split(w)))                                 ->  w in ND: "read through a view"

Works on a lowered graph (aten and npu operators). Nothing in the graph changes; the result is a
plan with one decision a weight. A weight stays ND with a reason, by the first rule that holds, in
the order of `RULES`. What an operator takes in NZ only (`NEEDED`: the MLA prolog's weights, MegaKDA's
projections, MXFP4 experts) is laid out on every SoC and in every mode; if it cannot be, the target
stops the compile.

Cases left alone on purpose: embeddings (gathered, not multiplied), the router (fp32), weights read
through slices (an NZ block has no sub-matrix at an arbitrary offset).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from hybridge.ir.effects import op_name
from hybridge.ir.pass_base import Match, PassResult, Refusal

FRACTAL_NZ, ND = "FRACTAL_NZ", "ND"
# MATMUL_MAX_AXIS of cann-recipes-infer: a longer axis of a matrix cannot be NZ.
MAX_AXIS = 65535
BLOCK_ROWS, BLOCK_BYTES = 16, 32
# C0 follows the rows' dtype: 32 elements beside MXFP8 rows, which are 16 bytes of MXFP4.
MXFP4_BLOCK_BYTES = 16

_RECIPES = "cann-recipes-infer module/linear.py, module/fuse_moe_gmm.py"
_RECIPES_950 = (
    "cann-recipes-infer kimi_k3/README.md (enable_weight_nz: False), glm_5_2/runner_glm.py (950: only "
    "q_a, q_b, kv_a), deepseek_v4/models/modeling_deepseek.py"
)
_MXFP4 = (
    "cann-recipes-infer module/quantization/mxfp4.py: npu_format_cast(w, 29, customize_dtype=e4m3) "
    "whatever the switch; hicann/ops-math npu_format_cast: C0 by the additional dtype"
)
_PROLOG = "hicann/ops-transformer aclnnMlaPrologV3WeightNz.md: these three in FRACTAL_NZ"
_MEGA = "cannbot_dsl mega_recurrent_kda README: FRACTAL_NZ allocation roots, no views"
_VLLM = "vllm-ascend utils.py _should_trans_nz"


# Operator -> places of the weights that it takes in NZ only, and who says so.
NEEDED: dict[str, tuple[tuple[int, ...], str]] = {
    "npu_mla_prolog_v3": ((1, 2, 4), _PROLOG),
    "mega_recurrent_kda": ((1, 2, 3, 4, 5, 7), _MEGA),
}


@dataclass(frozen=True)
class WeightUse:
    """How a graph reads one weight.

    Attributes:
        name: of the graph input.
        shape: as the graph reads it.
        dtype: torch's name of its dtype.
        operators: what reads it, through views, in order.
        through_view: a slice or split between it and a reader, or "".
        as_matrix: whether every reader multiplies by it.
        packed: bits of an element where several share a byte, else 0.
        group: elements that share a scale, 0 for none.
        per_tensor_scale: whether one scale serves the whole weight.
        mx: whether the packed elements are MXFP4 floats, not integers.
        needed_by: the operator that takes it in NZ only, or "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    operators: tuple[str, ...] = ()
    through_view: str = ""
    as_matrix: bool = True
    packed: int = 0
    group: int = 0
    per_tensor_scale: bool = False
    mx: bool = False
    needed_by: str = ""

    @property
    def block_bytes(self) -> int:
        """Bytes of a row of one NZ block."""
        return MXFP4_BLOCK_BYTES if self.mx else BLOCK_BYTES


@dataclass(frozen=True)
class NzPolicy:
    """What the target wants.

    Attributes:
        mode: "off", "quantised" (only quantised weights), or "all".
        only_where_needed: keep ND unless an operator needs NZ (Ascend 950).
    """

    mode: str = "all"
    only_where_needed: bool = False


@dataclass(frozen=True)
class Rule:
    """A reason for ND.

    Attributes:
        name: in a few words.
        reason: given a use and the policy, what was found, or None if the rule does not hold.
        remedy: what would change it.
        source: who says so.
    """

    name: str
    reason: Callable[[WeightUse, NzPolicy], str | None]
    remedy: str
    source: str


def _not_needed(use: WeightUse, policy: NzPolicy) -> str | None:
    if not policy.only_where_needed:
        return None
    return "no operator of this graph needs it in NZ, and this SoC reads ND as fast"


RULES: tuple[Rule, ...] = (
    Rule(
        "not multiplied by",
        lambda u, _: None if u.as_matrix else f"read by {', '.join(u.operators) or 'nothing'}",
        "nothing to gain",
        "FRACTAL_NZ is the Cube unit's layout",
    ),
    Rule(
        "not a matrix",
        lambda u, _: f"{len(u.shape)} dimensions" if len(u.shape) < 2 else None,
        "nothing to gain",
        "FRACTAL_NZ is a layout of matrices",
    ),
    Rule(
        "fp32",
        lambda u, _: "fp32 has no NZ" if u.dtype in ("float32", "float64") else None,
        "cast it to bf16",
        _VLLM,
    ),
    Rule(
        "unit dimension",
        lambda u, _: f"the last two of {u.shape} contain 1" if 1 in u.shape[-2:] else None,
        "nothing: the operator fails with EZ1001",
        "vllm-ascend #10014, PR #16058",
    ),
    Rule(
        "view",
        lambda u, _: f"read through {u.through_view}" if u.through_view else None,
        "make the parts weights of their own",
        _RECIPES,
    ),
    Rule(
        "axis too long",
        lambda u, _: (
            f"an axis of {max(u.shape[-2:])} > {MAX_AXIS}" if max(u.shape[-2:]) > MAX_AXIS else None
        ),
        "split the weight over devices",
        f"{_RECIPES}: MATMUL_MAX_AXIS",
    ),
    Rule(
        "4-bit group",
        lambda u, _: (
            f"4-bit elements with a group of {u.group}"
            if u.packed == 4 and not u.mx and u.group not in (64, 128)
            else None
        ),
        "requantise with groups of 64 or 128",
        "op-plugin npu_format_cast: int4 NZ takes groups of 64 or 128",
    ),
    Rule(
        "per-tensor fp8",
        lambda u, _: (
            "a grouped matmul with one scale faults on NZ"
            if u.per_tensor_scale and "npu_grouped_matmul" in u.operators
            else None
        ),
        "scale per channel",
        _RECIPES,
    ),
    Rule(
        "mode",
        lambda u, p: (
            f"the layout mode is {p.mode!r}"
            if p.mode == "off" or (p.mode == "quantised" and not u.packed)
            else None
        ),
        "compile with --nz all",
        _VLLM,
    ),
    Rule("not needed", _not_needed, "compile with --nz all", _RECIPES_950),
)


@dataclass(frozen=True)
class Layout:
    """The decision for one weight.

    Attributes:
        name: of the graph input. layout: "FRACTAL_NZ" or "ND".
        shape: logical. stored: what lies in memory, padding included. bytes: of `stored`.
        rule: why ND, or "multiplied by a matrix" or "needed by ...". reason: in full.
        source: of the rule.
    """

    name: str
    layout: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    bytes: int
    rule: str
    reason: str
    source: str = ""


def broken_needs(plan: Iterable[Layout], uses: Iterable[WeightUse]) -> list[str]:
    """What an operator takes in NZ only and cannot have: one sentence each."""
    needed = {use.name: use.needed_by for use in uses if use.needed_by}
    return [
        f"{layout.name}: {needed[layout.name]} takes it in {FRACTAL_NZ} only, but {layout.reason} "
        f"({layout.rule})"
        for layout in plan
        if layout.layout == ND and layout.name in needed
    ]


class AssignNzLayout:
    """The pass: one decision a weight, and the result that the pipeline reports."""

    name: ClassVar[str] = "assign_nz_layout"

    def run(
        self, uses: Iterable[WeightUse], policy: NzPolicy
    ) -> tuple[PassResult, tuple[Layout, ...]]:
        """Decide for every use.

        Returns:
            The result (a match a NZ weight, a refusal a ND one), and the plan.
        """
        start = time.perf_counter()
        plan = tuple(decide(use, policy) for use in uses)
        matches = tuple(Match(p.name, (FRACTAL_NZ,)) for p in plan if p.layout == FRACTAL_NZ)
        refusals = tuple(
            Refusal(p.name, p.rule, p.reason, _remedy(p.rule)) for p in plan if p.layout == ND
        )
        count = len(plan)
        took = time.perf_counter() - start
        return PassResult(self.name, matches, refusals, False, count, count, 0, took), plan


def _remedy(rule: str) -> str:
    return next((r.remedy for r in RULES if r.name == rule), "")


def decide(use: WeightUse, policy: NzPolicy) -> Layout:
    """The layout of one weight by the first rule that speaks against NZ."""
    for rule in RULES:
        if use.needed_by and rule.name in ("not needed", "mode"):
            continue
        reason = rule.reason(use, policy)
        if reason is not None:
            size = _itemsize(use.dtype)
            total = size
            for length in use.shape:
                total *= length
            return Layout(use.name, ND, use.shape, use.shape, total, rule.name, reason, rule.source)
    stored = stored_shape(use.shape, _itemsize(use.dtype), use.block_bytes)
    total = _itemsize(use.dtype)
    for length in stored:
        total *= length
    why, source = "multiplied by a matrix", _RECIPES
    if use.needed_by:
        why = "needed by its operator"
        source = _MXFP4 if use.mx else NEEDED[use.needed_by][1]
    reason = f"read by {', '.join(use.operators)}"
    return Layout(use.name, FRACTAL_NZ, use.shape, stored, total, why, reason, source)


def stored_shape(
    shape: tuple[int, ...], itemsize: int, block_bytes: int = BLOCK_BYTES
) -> tuple[int, ...]:
    """[..., columns / C0, rows / 16, 16, C0] of a matrix [..., rows, columns], C0 = block_bytes."""
    columns = block_bytes // itemsize
    *stack, rows, width = shape
    return (*stack, -(-width // columns), -(-rows // BLOCK_ROWS), BLOCK_ROWS, columns)


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


# ------------------------------------------------------------------- reading uses from a graph

# Views under which a whole matrix is still the whole matrix.
_WHOLE = ("aten::t", "aten::transpose", "aten::permute", "aten::clone", "aten::_to_copy")
# ... and those that read a part of it, or another shape.
_PART = (
    *("aten::slice", "aten::select", "aten::split", "aten::split_with_sizes", "aten::narrow"),
    *("aten::view", "aten::_unsafe_view", "aten::reshape", "aten::unflatten", "aten::expand"),
    *("aten::unsqueeze", "getitem", "aten::tensor_split", "aten::chunk"),
)
_MATMULS = {
    "aten::mm": 1,
    "aten::addmm": 2,
    "aten::linear": 1,
    "aten::matmul": 1,
    "npu::npu_grouped_matmul": 1,
}


def weight_uses(
    graph: Graph, weights: Iterable[str], groups: Mapping[str, int] | None = None
) -> tuple[WeightUse, ...]:
    """How each weight input is read.

    Args:
        graph: a lowered graph with metadata.
        weights: names of the inputs that are weights.
        groups: of packed 4-bit weights, the elements that share a scale.
    """
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    return tuple(_use(inputs[name], (groups or {}).get(name, 0)) for name in weights)


def _use(node: Node, group: int) -> WeightUse:
    readers, view = _readers(node)
    names = tuple(dict.fromkeys(_short(reader) for reader, _ in readers))
    value = node.meta["val"]
    mx = bool(group) and "npu_grouped_matmul" in names
    needing = [_short(r) for r, operand in readers if _takes_nz_only(r, operand)]
    needing += ["npu_grouped_matmul"] if mx else []
    return WeightUse(
        name=node.name,
        shape=tuple(int(size) for size in value.shape),
        dtype=str(value.dtype).removeprefix("torch."),
        operators=names,
        through_view=view,
        as_matrix=bool(readers) and all(_multiplies(r, operand) for r, operand in readers),
        packed=4 if group else 0,
        group=group,
        mx=mx,
        needed_by=needing[0] if needing else "",
    )


def _short(node: Node) -> str:
    return op_name(node).split("::")[-1]


def _takes_nz_only(reader: Node, operand: Node) -> bool:
    places, _ = NEEDED.get(_short(reader), ((), ""))
    return any(reader.args[place] is operand for place in places)


def _multiplies(reader: Node, operand: Node) -> bool:
    name = op_name(reader)
    if name == "aten::bmm" or _takes_nz_only(reader, operand):
        return True
    place = _MATMULS.get(name)
    if place is None or place >= len(reader.args):
        return False
    argument: Any = reader.args[place]
    return operand in argument if isinstance(argument, list | tuple) else operand is argument


def _readers(node: Node) -> tuple[list[tuple[Node, Node]], str]:
    """(reader, the node that it reads) behind views, and the first view of a part."""
    found: list[tuple[Node, Node]] = []
    view = ""
    for user in node.users:
        name = op_name(user)
        if name in _PART:
            view = view or f"{name.split('::')[-1]} ({user.name})"
        if name in _PART or name in _WHOLE:
            behind, deeper = _readers(user)
            found += behind
            view = view or deeper
        else:
            found.append((user, node))
    return found, view
