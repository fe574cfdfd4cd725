"""The whole pipeline on the three families, both phases: counts, values, hard batches, idempotence, dumps, errors."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from golden_data import FOLDER
from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.pipeline import (
    PIPELINE,
    _compare,
    _results,
    pass_names,
    run_pipeline,
)
from hybridge.compiler.trace import trace
from hybridge.ir.batch import Batch, example_values
from hybridge.ir.pass_base import Pass, PassContext, PassResult, run_pass
from hybridge.ir.signature import METADATA, PHASES, mark_weights, shape_of
from hybridge.ir.text import graph_text
from hybridge.models.config import load_config
from kda_graphs import PlainKda, inputs_of
from plain_maths import calls, export

FAMILIES = ("kimi-k3.1-tiny", "kimi-k3-tiny", "kimi-linear-tiny")
CONFIGS = (*FAMILIES, "kimi-k3.1-tiny-mxfp4")
PROOFS: dict[str, Any] = {}


@cache
def _traced(name: str, phase: str) -> GraphModule:
    traced = trace(load_config(FOLDER / name), phase, block_size=4)  # type: ignore[arg-type]
    mark_weights(traced.graph_module, traced.weights)
    return traced.graph_module


def of_metadata_alone(gm: GraphModule) -> list[str]:
    """The calls that compute something from the batch's integers only; sizes do not count."""
    known = {node for node in gm.graph.nodes if node.op == "placeholder" and node.name in METADATA}
    found = []
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if inputs and all(each in known for each in inputs) and shape_of(node) is not None:
            known.add(node)
            found.append(node.name)
    return found


def traced_copy(name: str, phase: str) -> GraphModule:
    gm = copy.deepcopy(_traced(name, phase))
    for old, new in zip(_traced(name, phase).graph.nodes, gm.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    return gm


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_expected_site_fuses_and_no_value_changes(name: str, phase: str) -> None:
    config, gm = load_config(FOLDER / name), traced_copy(name, phase)
    report = run_pipeline(gm, phase, config, check=True, proofs=PROOFS)
    for result in report.results:
        assert len(result.matches) >= result.expected
        assert result.difference is None or result.difference < 1e-4
        assert not [each for each in result.refusals if result.name.startswith("fuse_")]
    counts = Counter(calls(gm))
    full = config.layer_kinds.count("dsa") + config.layer_kinds.count("mla")
    assert counts[f"kda_{phase}"] == config.layer_kinds.count("kda")
    assert counts["sparse_flash_attention"] + counts["mla_attention"] == full
    assert counts["kda_recurrence"] == 0
    experts = "moe_experts_mxfp4" if config.quantization else "moe_experts"
    layers = sum(config.is_moe_layer(layer) for layer in range(config.num_layers))
    assert counts[experts] == counts["moe_route"] == layers > 0
    # The ops read the batch as it is: no lengths, positions or gathered tables are left, in any layer.
    assert of_metadata_alone(_traced(name, phase))
    assert not of_metadata_alone(gm)
    assert report.results[-1].moved_after < report.results[0].moved_before / 3
    again = run_pipeline(gm, phase, config, passes=[], proofs=PROOFS)
    assert again.results == ()


@cache
def _twice(name: str, phase: str) -> tuple[GraphModule, dict[str, tuple[PassResult, str, str]]]:
    """A fused graph; for each pass what a second run straight after it says, and the graph before and after that."""
    gm, second = traced_copy(name, phase), {}
    for step in PIPELINE:
        run_pass(step, PassContext(gm, phase, PROOFS))
        before = graph_text(gm.graph)
        result = run_pass(step, PassContext(gm, phase, PROOFS))
        second[step.name] = (result, before, graph_text(gm.graph))
    return gm, second


@pytest.mark.parametrize("step", PIPELINE, ids=pass_names())
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_run_of_a_pass_changes_nothing(name: str, phase: str, step: Pass) -> None:
    gm, second = _twice(name, phase)
    result, before, after = second[step.name]
    assert not result.modified
    assert not result.matches
    assert after == before
    whole = graph_text(gm.graph)
    again = run_pass(step, PassContext(gm, phase, PROOFS))
    assert not again.modified
    assert not again.matches
    assert graph_text(gm.graph) == whole


def test_a_pass_comes_after_the_passes_that_it_needs() -> None:
    names = pass_names()
    for step in PIPELINE:
        assert all(names.index(other) < names.index(step.name) for other in step.needs), step.name


def hard_batch(phase: str) -> tuple[Batch, dict[str, Tensor]]:
    """Padding at the end, an inactive row, -1 in the block table past a sequence's end, a block of two sequences."""
    example = Batch("hard", (2, 3, 1), (4, 5, 3), 9, (True, True, False), 4, 4, 9, 5)
    if phase == "decode":
        example = Batch("hard", (1, 1, 1), (4, 9, 3), 3, (True, True, False), 4, 4, 9, 5)
    inputs = example.inputs()
    for row, (length, context) in enumerate(zip(example.lengths, example.contexts, strict=True)):
        inputs["block_table"][row, -(-(length + context) // 4) :] = -1
    # Both have four tokens in it from before, so that neither writes there.
    inputs["block_table"][1, 0] = inputs["block_table"][0, 0]
    idle = sum(example.lengths[:2])
    inputs["slot_mapping"][idle:] = -1
    inputs["logits_index"] = inputs["logits_index"][:2]
    return example, inputs


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_holes_and_shared_blocks_change_nothing_else(name: str, phase: str) -> None:
    plain, (fused, _) = traced_copy(name, phase), _twice(name, phase)
    example, batch = hard_batch(phase)
    inputs = {**example_values(plain), **batch}
    held = [
        name for name in inputs if name.startswith(("kda_", "conv_state", "latent_", "indexer_"))
    ]
    generator = torch.Generator().manual_seed(1)
    for each in held:
        rows = example.blocks if "cache" in each else example.slots
        inputs[each] = torch.randn((rows, *inputs[each].shape[1:]), generator=generator)
    before, after = _results(plain, inputs), _results(fused, inputs)
    assert before is not None and after is not None
    _compare("the pipeline", before, after)
    for each in held:
        cached = "cache" in each
        owned = batch["slot_mapping" if cached else "state_slot"]
        now, then = (x.flatten(0, 1) if cached else x for x in (after[each], inputs[each]))
        others = [row for row in range(len(then)) if row not in owned.tolist()]
        assert torch.equal(now[others], then[others]), each
        assert not torch.equal(now, then), each


def test_sparse_attention_does_not_need_the_indexers_pass() -> None:
    config, gm = load_config(FOLDER / "kimi-k3.1-tiny"), traced_copy("kimi-k3.1-tiny", "prefill")
    run_pipeline(gm, "prefill", config, passes=["fuse_sparse_flash_attention"], proofs=PROOFS)
    assert Counter(calls(gm))["sparse_flash_attention"] == config.layer_kinds.count("dsa")


@dataclass(frozen=True)
class OneKdaLayer:
    """The shape of a model that is one KDA layer and nothing else."""

    layer_kinds: tuple[str, ...] = ("kda",)
    attn_res_block_size: int | None = None
    activation: str = "silu"

    def is_moe_layer(self, layer: int) -> bool:
        return False

    def has_mlp(self, layer: int) -> bool:
        return False


LAYER_PASSES = ["canonicalise", "fuse_kda"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_cache_may_be_written_in_parts_that_a_pass_joins(phase: str) -> None:
    inputs = inputs_of(phase)
    gm = export(PlainKda(phase, form="three writes"), phase, inputs)
    assert calls(gm).count("state_write") >= 3
    values = {**gm.meta["values"], **inputs}
    report = run_pipeline(
        gm, phase, OneKdaLayer(), passes=LAYER_PASSES, check_inputs=values, proofs=PROOFS
    )
    assert calls(gm) == [f"kda_{phase}"]
    assert report.results[-1].difference is not None


@pytest.mark.parametrize("phase", PHASES)
def test_a_cache_that_stays_written_in_parts_is_refused(phase: str) -> None:
    gm = export(PlainKda(phase, form="three writes"), phase, inputs_of(phase))
    with pytest.raises(CompileError) as caught:
        run_pipeline(gm, phase, OneKdaLayer(), passes=["canonicalise"], proofs=PROOFS)
    message = str(caught.value)
    assert "after all passes: one writer a cache: conv_state is written in parts, by " in message
    assert "state_write, state_write_1, state_write_2" in message
    assert "write the whole cache once" in message


def test_dumps_are_numbered_by_step(tmp_path: Path) -> None:
    config, gm = load_config(FOLDER / "kimi-linear-tiny"), traced_copy("kimi-linear-tiny", "decode")
    chosen = ["canonicalise", "fuse_lightning_indexer"]
    report = run_pipeline(gm, "decode", config, passes=chosen, dump_dir=tmp_path, proofs=PROOFS)
    names = ["00_trace", "01_canonicalise", "02_fuse_lightning_indexer"]
    assert list(report.dumps) == names
    assert sorted(path.stem for path in tmp_path.iterdir()) == names


def test_an_unknown_pass_lists_the_known_ones() -> None:
    config, gm = load_config(FOLDER / "kimi-linear-tiny"), traced_copy("kimi-linear-tiny", "decode")
    with pytest.raises(UsageError) as caught:
        run_pipeline(gm, "decode", config, passes=["fuse_everything"])
    assert "fuse_everything" in str(caught.value)
    assert ", ".join(pass_names()) in str(caught.value)


def test_a_missed_site_fails_the_build_with_node_and_rule() -> None:
    config, gm = load_config(FOLDER / "kimi-k3.1-tiny"), traced_copy("kimi-k3.1-tiny", "decode")
    relu = next(node for node in gm.graph.nodes if "relu" in str(node.target))
    relu.replace_all_uses_with(relu.args[0])
    gm.graph.erase_node(relu)
    with pytest.raises(CompileError) as caught:
        run_pipeline(gm, "decode", config, proofs=PROOFS)
    message = str(caught.value)
    assert "fuse_lightning_indexer: 1 of 2 expected sites match in the decode graph" in message
    assert "refused by the rule 'scores are rectified by relu'" in message
    assert "remedy" in message
