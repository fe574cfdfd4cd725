"""The pipeline: one list, read top to bottom. A step's name is its dump's file name and its name in every message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from hybridge.artifacts.errors import CompileError, UsageError, VerifyError
from hybridge.ir.batch import example_values
from hybridge.ir.cost import bytes_moved
from hybridge.ir.derived import materialise
from hybridge.ir.pass_base import ModelShape, Pass, PassContext, PassResult, run_pass
from hybridge.ir.signature import mark_weights, weight_name
from hybridge.ir.spec import FOR_TARGETS, require_model, require_valid
from hybridge.ir.text import module_text
from hybridge.passes.canonicalise import Canonicalise
from hybridge.passes.fuse_attn_res import FuseAttnRes
from hybridge.passes.fuse_attn_res_norm import FuseAttnResNorm
from hybridge.passes.fuse_kda import FuseKda
from hybridge.passes.fuse_lightning_indexer import FuseLightningIndexer
from hybridge.passes.fuse_moe import FuseMoe
from hybridge.passes.fuse_rms_norm import FuseRmsNorm
from hybridge.passes.fuse_situ import FuseSitu
from hybridge.passes.fuse_sparse_flash_attention import FuseSparseFlashAttention
from hybridge.passes.merge_projections import MergeProjections

PIPELINE: tuple[Pass, ...] = (
    Canonicalise(),
    # The indexer first: sparse attention then knows that its positions are ascending, distinct and causal.
    FuseLightningIndexer(),
    FuseSparseFlashAttention(),
    FuseAttnRes(),
    FuseKda(),
    # After the fusion that says which projections belong to a layer, and in which order decode has them.
    MergeProjections(),
    FuseMoe(),
    # After the larger fusions, which take the norms that belong to them.
    FuseRmsNorm(),
    FuseAttnResNorm(),
    FuseSitu(),
)

#: Largest difference between two steps that is still rounding, relative to the largest value.
STEP_TOLERANCE = 1e-3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PipelineReport:
    """What the pipeline did to one phase.

    Args:
        phase: "prefill" or "decode".
        results: one a pass, in order.
        dumps: `03_fuse_lightning_indexer` -> the graph after that step, as text; empty unless asked for.
    """

    phase: str
    results: tuple[PassResult, ...]
    dumps: Mapping[str, str] = field(default_factory=dict)


def pass_names() -> tuple[str, ...]:
    """Every pass, in pipeline order."""
    return tuple(step.name for step in PIPELINE)


def select_passes(names: Sequence[str] | None) -> tuple[Pass, ...]:
    """The passes of these names, in pipeline order; all for None.

    Raises:
        UsageError: a name is not a pass.
    """
    if names is None:
        return PIPELINE
    unknown = [name for name in names if name not in pass_names()]
    if unknown:
        raise UsageError(
            f"there is no pass called {', '.join(map(repr, unknown))}",
            f"the passes are: {', '.join(pass_names())}",
        )
    return tuple(step for step in PIPELINE if step.name in names)


def run_pipeline(
    graph_module: GraphModule,
    phase: str,
    config: ModelShape,
    *,
    passes: Sequence[str] | None = None,
    keep_dumps: bool = False,
    dump_dir: Path | None = None,
    check: bool = False,
    check_inputs: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, str] | None = None,
    proofs: dict[str, Any] | None = None,
    on_step: Callable[[PassResult], None] | None = None,
) -> PipelineReport:
    """Run the passes over one phase's graph, in place.

    Args:
        graph_module: the traced graph.
        phase: "prefill" or "decode".
        config: of the model; expected match counts come from it.
        passes: names of the passes to run; None runs all. Expected counts are enforced for those that run and
            whose needs run.
        keep_dumps: keep the graph as text, before the first pass and after each one, in the report.
        dump_dir: a folder to write these texts to as well, one file a step.
        check: run the graph on small inputs after each pass and compare with the run before.
        check_inputs: the inputs for that, one for every input of the graph (weights by their own name or by
            the input's); made up if `check` asks for them.
        weights: placeholder name -> weight name, where the tracer has not marked them.
        proofs: verdicts of equal regions; hand the same dictionary to both phases to prove once.
        on_step: called after each pass.

    Raises:
        UsageError: a name in `passes` is unknown.
        CompileError: fewer matches than the config calls for, or a graph that is not valid.
        VerifyError: a step changed the results.
    """
    steps = select_passes(passes)
    if weights:
        mark_weights(graph_module, dict(weights))
    require_model(graph_module, "trace")
    dumps = _Dumps(keep_dumps, dump_dir)
    dumps.add("trace", graph_module)
    if check and check_inputs is None:
        check_inputs = example_values(graph_module)
    run = _Run(graph_module, phase, {} if proofs is None else proofs, check_inputs)
    names = {step.name for step in steps}
    results: list[PassResult] = []
    for step in steps:
        able = all(name in names for name in step.needs)
        result = run.apply(step, expected=step.expect(config, phase) if able else 0)
        dumps.add(step.name, graph_module)
        results.append(result)
        if on_step is not None:
            on_step(result)
    require_model(graph_module, "after all passes", FOR_TARGETS)
    return PipelineReport(phase, tuple(results), dumps.texts)


class _Run:
    """One graph on its way through the passes, with what is known of it so far."""

    def __init__(
        self,
        gm: GraphModule,
        phase: str,
        proofs: dict[str, Any],
        check_inputs: Mapping[str, Tensor] | None,
    ) -> None:
        self._gm, self._phase, self._proofs, self._inputs = gm, phase, proofs, check_inputs
        self._values = _results(gm, check_inputs)
        self._moved = bytes_moved(gm.graph)

    def apply(self, step: Pass, expected: int) -> PassResult:
        """One pass, and whether its graph is valid, has the matches that it should, and computes the same."""
        result = run_pass(step, PassContext(self._gm, self._phase, self._proofs))
        before = self._moved
        if result.modified:
            self._moved = bytes_moved(self._gm.graph)
        result = replace(result, expected=expected, moved_before=before, moved_after=self._moved)
        require_valid(self._gm, step.name)
        _require_matches(result, self._phase)
        if self._inputs is not None and result.modified:
            values = _results(self._gm, self._inputs)
            result = replace(result, difference=_compare(step.name, self._values, values))
            self._values = values
        _logger.debug("%s %s: %d matches", self._phase, step.name, len(result.matches))
        return result


def _require_matches(result: PassResult, phase: str) -> None:
    """Fail the build where a fusion that the model calls for did not happen."""
    if len(result.matches) >= result.expected:
        return
    found = f"{len(result.matches)} of {result.expected} expected sites match in the {phase} graph"
    if not result.refusals:
        raise CompileError(
            f"{result.name}: {found}, and no other site resembles the pattern",
            "the model's maths changed: compare the dump before this pass with the pass's docstring, or leave the "
            f"pass out: --passes without {result.name}",
        )
    first = result.refusals[0]
    raise CompileError(
        f"{result.name}: {found}; {first.node} refused by the rule '{first.rule}': {first.reason}",
        first.remedy,
    )


class _Dumps:
    """Numbered texts of the graph, one a step."""

    def __init__(self, keep: bool, folder: Path | None) -> None:
        self._keep, self._folder = keep or folder is not None, folder
        self.texts: dict[str, str] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, step: str, gm: GraphModule) -> None:
        if not self._keep:
            return
        name = f"{len(self.texts):02d}_{step}"
        self.texts[name] = module_text(gm)
        if self._folder is not None:
            (self._folder / f"{name}.txt").write_text(self.texts[name], encoding="utf-8")


class _OnCopies(Interpreter):
    """Runs a graph on the CPU whatever device it was traced on."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)


def _results(
    gm: GraphModule, check_inputs: Mapping[str, Tensor] | None
) -> dict[str, Tensor] | None:
    """Outputs and written inputs of one run; inputs are copied, as a run writes to its caches."""
    if check_inputs is None:
        return None
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    recipes = gm.meta.get("derived_weights", {})
    values = [_input(node, check_inputs, recipes).clone() for node in nodes]
    with torch.no_grad():
        outputs = _OnCopies(gm).run(*values)
    flat = torch.utils._pytree.tree_leaves(outputs)
    found = {f"output {place}": value for place, value in enumerate(flat)}
    written = zip(nodes, values, strict=True)
    found |= {node.name: value for node, value in written if weight_name(node) is None}
    return found


def _input(node: Node, values: Mapping[str, Tensor], recipes: Mapping[str, Any]) -> Tensor:
    def load(name: str) -> Tensor:
        if name not in values:
            raise UsageError(
                f"check_inputs has no value for {name}", "give every input and every weight a value"
            )
        return values[name]

    if str(node.target) in values:
        return values[str(node.target)]
    return materialise(weight_name(node) or str(node.target), recipes, load)


def _compare(step: str, before: dict[str, Tensor] | None, after: dict[str, Tensor] | None) -> float:
    """The largest difference between two runs, relative to each value's largest magnitude."""
    assert before is not None and after is not None
    worst = 0.0
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            raise VerifyError(f"{step}: {name} changed its shape or dtype", "report this pass")
        if not old.numel():
            continue
        left, right = old.to(torch.float64), new.to(torch.float64)
        difference = float((left - right).abs().max() / max(1.0, float(left.abs().max())))
        worst = max(worst, difference)
        if not difference <= STEP_TOLERANCE:
            raise VerifyError(
                f"{step}: {name} differs by {difference:.3g} from the graph before this pass",
                f"compile without {step} and report it with the dumps",
            )
    return worst
