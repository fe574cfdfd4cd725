"""Scopes over runs of fusible kernels, and the reasons for what stays outside."""

from dataclasses import replace

import pytest
import torch

from hybridge.ir.schedule_ops import SUPER_KERNEL, schedule_of
from hybridge.passes.assign_streams import AssignStreams
from hybridge.passes.check_schedule import prove
from hybridge.passes.merge_super_kernels import MergeSuperKernels, SuperKernelPolicy

from .lowered_graphs import MACHINE, experts, indexer_prolog, trace

SLOW_LAUNCH = replace(MACHINE, launch=1e-3)  # so that every run is worth it


def merged(gm, machine=SLOW_LAUNCH, **policy):
    result, scopes = MergeSuperKernels().run(gm, machine, SuperKernelPolicy(**policy))
    return result, scopes, schedule_of(gm.graph, machine.aic, machine.aiv)


def test_one_stream_without_events_is_one_scope():
    result, scopes, schedule = merged(experts())
    assert len(scopes) == 1
    assert "npu_moe_gating_top_k" in scopes[0].nodes
    assert "npu_moe_finalize_routing" in scopes[0].nodes
    assert prove(schedule).proved
    assert prove(schedule).scopes == 1
    assert result.matches[0].replacement == scopes[0].nodes


@pytest.mark.parametrize("make", [experts, indexer_prolog])
def test_no_scope_holds_an_event_or_a_side_stream(make):
    gm = make()
    AssignStreams().run(gm, MACHINE, "decode")
    _, _, schedule = merged(gm)
    assert prove(schedule).proved
    side = [n for n in gm.graph.nodes if n.meta.get("stream", "main") != "main"]
    assert side
    assert all(SUPER_KERNEL not in node.meta for node in side)


def test_exclusions_split_a_run_and_say_why():
    result, scopes, _ = merged(
        experts(), excluded=(("npu_moe_gating_top_k", "not known to be fusible"),)
    )
    assert len(scopes) == 1
    assert "npu_moe_gating_top_k" not in scopes[0].nodes
    assert "UNFUSIBLE_NODE" in [refusal.rule for refusal in result.refusals]
    assert any("not known to be fusible" in refusal.reason for refusal in result.refusals)


def test_dynamic_shapes_have_no_scope():
    result, scopes, _ = merged(experts(), static_shapes=False)
    assert scopes == ()
    assert {refusal.rule for refusal in result.refusals} == {"DYNAMIC_TASK_UNSUPPORT"}


def test_a_run_that_saves_too_little_is_left_alone():
    _, scopes, _ = merged(experts(), replace(MACHINE, launch=1e-9))
    assert scopes == ()


def test_short_runs_are_left_alone():
    gm = trace(lambda x, w: torch.sin(x @ w), x=(16, 64), w=(64, 64))
    result, scopes, _ = merged(gm)
    assert scopes == ()
    assert "fewer than 4 kernels" in result.refusals[0].reason
