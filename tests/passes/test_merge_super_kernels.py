"""Scopes over runs of fusible kernels, and the reasons for what stays outside."""

from dataclasses import replace

import pytest
import torch

from hybridge.ir.schedule_ops import SUPER_KERNEL, schedule_of
from hybridge.passes.assign_streams import AssignStreams
from hybridge.passes.check_schedule import prove
from hybridge.passes.merge_super_kernels import MergeSuperKernels, SuperKernelPolicy

from .lowered_graphs import MACHINE, experts, indexer_prolog, spread_experts, trace

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
    AssignStreams().run(gm, MACHINE)
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


def test_the_routed_experts_are_one_scope_from_the_router_to_the_sum():
    """As the recipes lay it: router, routing, both products, activation, combination."""
    _, (scope,), _ = merged(experts())
    inside = [name.rstrip("_0123456789") for name in scope.nodes]
    wanted = ("npu_moe_gating_top_k", "npu_moe_init_routing_v", "npu_grouped_matmul", "situ_glu")
    places = [inside.index(name) for name in (*wanted, "npu_moe_finalize_routing")]
    assert places == sorted(places)


def test_more_scopes_than_there_may_be_are_refused(monkeypatch):
    monkeypatch.setattr("hybridge.passes.merge_super_kernels.MAX_SCOPES", 1)
    gm = experts()
    AssignStreams().run(gm, MACHINE)
    before = merged(experts(), excluded=(("npu_grouped_matmul", "told to"),))
    assert len(before[1]) == 1
    assert "RESOURCE_INSUFFICIENT" in [refusal.rule for refusal in before[0].refusals]


def test_a_kernel_with_core_limits_stays_outside():
    gm = spread_experts()
    AssignStreams().run(gm, MACHINE)
    result, scopes, schedule = merged(gm)
    limited = {node.name for node in gm.graph.nodes if "cores" in node.meta}
    assert limited
    assert not any(limited & set(scope.nodes) for scope in scopes)
    assert prove(schedule).proved
    # Collectives are told as such; what is left is limited for their sake, on the side stream.
    assert {"OP_UNSUPPORT"} <= {refusal.rule for refusal in result.refusals}


def test_core_limits_inside_a_run_split_it_with_the_reason():
    gm = experts()
    (limited,) = [n for n in gm.graph.nodes if "finalize_routing" in n.name]
    limited.meta["cores"] = (23, 40)
    result, scopes, _ = merged(gm)
    assert not any(limited.name in scope.nodes for scope in scopes)
    (refusal,) = [each for each in result.refusals if each.rule == "DEADLOCK_DETECTED"]
    assert "leaves cores to another stream" in refusal.reason
