"""Experts over several devices: every device a thread, and all together equal one that has every expert."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybridge.artifacts.errors import CompileError, UsageError
from hybridge.compiler.targets.ascend import convert as ge
from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.expert_parallel import ExpertParallel
from hybridge.compiler.targets.ascend.graph_source import graph_json, python_source
from hybridge.compiler.targets.ascend.npu_reference.expert_parallel import simulated_group
from hybridge.ir.schedule import MAIN_STREAM, Engine, HappensBefore
from hybridge.ir.schedule_ops import schedule_of, stream_of
from hybridge.passes.assign_streams import AssignStreams
from hybridge.passes.check_schedule import prove
from hybridge.passes.merge_super_kernels import MergeSuperKernels, SuperKernelPolicy

from . import op_cases as cases
from .lowered_graphs import MACHINE, spread_experts

SOCS = ["ascend-a3", "ascend-950"]
needs_wheel = pytest.mark.skipif(stand_in.find_wheel() is None, reason="needs the torch-npu wheel")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def of_rank(case, rank):
    """The case with rows of its own; the weights are the same on every device."""
    generator = torch.Generator().manual_seed(100 + rank)
    rows = ("x", "hidden")
    own = {n: torch.randn(case.values[n].shape, generator=generator) for n in rows}
    return dataclasses.replace(case, values={**case.values, **own})


def run_together(case, devices, soc, change=lambda lowered: None):
    """(the results of all devices, what each would get with every expert at hand)."""
    ranked = [of_rank(case, rank) for rank in range(devices)]
    lowered = [case.lower(soc, parallel=ExpertParallel(devices, r)) for r in range(devices)]
    for each in lowered:
        change(each)
    with simulated_group("ep", devices) as fail, ThreadPoolExecutor(devices) as threads:

        def run(rank):
            try:
                return ranked[rank].run(lowered[rank])[0]
            except BaseException:
                fail()
                raise

        results = list(threads.map(run, range(devices)))
    return results, [each.eager()[0] for each in ranked]


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("devices", [2, 3, 6])
@pytest.mark.parametrize("decode", [False, True])
def test_shared_experts_equal_the_undivided_model(soc, devices, decode):
    case = cases.moe_case("situ", width=1024, decode=decode)
    for mine, whole in zip(*run_together(case, devices, soc), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("soc", "tolerance"), [("ascend-a3", 1e-4), ("ascend-950", 0.1)])
def test_mxfp4_experts_travel_as_mxfp8_where_there_is_fp8(soc, tolerance):
    case = cases.moe_case("situ", mxfp4=True, width=1024, decode=True)
    lowered = case.lower(soc, parallel=ExpertParallel(2, 1))
    (dispatch,) = [n for n in lowered.graph_module.graph.nodes if "dispatch_v2" in str(n.target)]
    assert dispatch.kwargs.get("quant_mode", 0) == (4 if soc == "ascend-950" else 0)
    for mine, whole in zip(*run_together(case, 2, soc), strict=True):
        torch.testing.assert_close(mine.float(), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("places", [(0, 1), (2, 3), (1, 4)])
def test_arguments_of_combine_in_another_order_are_caught(places):
    def swap(lowered):
        graph = lowered.graph_module.graph
        (combine,) = [n for n in graph.nodes if "combine_v2" in str(n.target)]
        args = list(combine.args)
        args[places[0]], args[places[1]] = args[places[1]], args[places[0]]
        combine.args = tuple(args)
        lowered.graph_module.recompile()

    case = cases.moe_case("situ", width=1024, decode=True)
    try:
        results, wholes = run_together(case, 2, "ascend-950", swap)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return
    assert not all(
        mine.shape == whole.shape and torch.allclose(mine, whole, atol=1e-3)
        for mine, whole in zip(results, wholes, strict=True)
    )


def test_a_device_holds_its_own_experts_only():
    case = cases.moe_case("situ", mxfp4=True, width=1024)
    lowered = case.lower("ascend-950", parallel=ExpertParallel(3, 2))
    weights = {weight.name: weight for weight in lowered.weights}
    assert weights["up"].shape == (2, 256, 512)
    assert weights["up_scale"].shape == (2, 256, 32)
    assert weights["up"].steps == (("aten.slice.Tensor", (0, 4, 6), ()),)
    assert weights["gate"].shape[0] == 6  # the router knows all


def test_what_dispatch_cannot_take_is_told():
    with pytest.raises(UsageError, match="6 experts over 4 devices leave 2 over"):
        cases.moe_case("situ", width=1024).lower("ascend-950", parallel=ExpertParallel(4))
    with pytest.raises(UsageError, match="rank 2 of 2"):
        ExpertParallel(2, 2)
    with pytest.raises(CompileError, match="hidden size is 128, must be 1024 to 8192"):
        cases.moe_case("situ").lower("ascend-950", parallel=ExpertParallel(2))


def test_a_rank_that_fails_frees_the_others():
    case = cases.moe_case("situ", width=1024, decode=True)

    def break_one(lowered):
        (dispatch,) = [
            n for n in lowered.graph_module.graph.nodes if "dispatch_v2" in str(n.target)
        ]
        if dispatch.args[4] == 0:  # the rank
            dispatch.kwargs = {**dispatch.kwargs, "expert_token_nums_type": 0}
            lowered.graph_module.recompile()

    with pytest.raises(NotImplementedError, match="counts"):
        run_together(case, 2, "ascend-950", break_one)


# --------------------------------------------------------------------------- beside communication


def test_the_shared_expert_runs_beside_dispatch_and_combine():
    gm = spread_experts()
    result, choices = AssignStreams().run(gm, MACHINE)
    assert len(result.matches) == 1
    schedule = schedule_of(gm.graph, MACHINE.aic, MACHINE.aiv)
    assert prove(schedule).proved
    far = [task for task in schedule.tasks if task.engine is Engine.COMMUNICATION]
    assert len(far) == 2
    assert {task.stream for task in far} == {MAIN_STREAM}
    assert "beside npu_moe_distribute" in choices[0].why
    for unlimited in prove_without_limits(gm):
        assert "waits for all its vector cores" in unlimited.reason


def test_core_limits_are_in_the_source_and_the_json_for_npugraph_ex():
    gm = spread_experts()
    AssignStreams().run(gm, MACHINE)
    limited = next(n for n in gm.graph.nodes if "cores" in n.meta and stream_of(n) != MAIN_STREAM)
    aic, aiv = limited.meta["cores"]
    source = python_source(gm, schedule_of(gm.graph, MACHINE.aic, MACHINE.aiv), "A graph.")
    compile(source, "source.py", "exec")
    scope = f"        with torch.npu.npugraph_ex.scope.limit_core_num({aic}, {aiv}):"
    assert f"{scope}\n            {limited.name} = " in source
    records = {record["name"]: record for record in json.loads(graph_json(gm))["nodes"]}
    assert records[limited.name]["cores"] == [aic, aiv]


def prove_without_limits(gm):
    """What the proof says once the core limits are taken away; never nothing."""
    limited = [node for node in gm.graph.nodes if "cores" in node.meta]
    assert {"npu_moe_distribute" in str(node.target) for node in limited} == {True, False}
    total = {sum(n.meta["cores"][1] for n in pair) for pair in beside_each_other(gm, limited)}
    assert total
    assert max(total) <= MACHINE.aiv
    for node in limited:
        del node.meta["cores"]
    problems = prove(schedule_of(gm.graph, MACHINE.aic, MACHINE.aiv)).problems
    assert problems
    return problems


def beside_each_other(gm, nodes):
    """Pairs of limited kernels on two streams that may run at once."""
    order = HappensBefore(schedule_of(gm.graph, MACHINE.aic, MACHINE.aiv))
    for first in nodes:
        for second in nodes:
            apart = stream_of(first) != stream_of(second)
            if apart and not order.ordered(first.name, second.name):
                yield first, second


def test_a_collective_on_a_side_stream_is_refused_by_the_proof():
    gm = spread_experts()
    AssignStreams().run(gm, MACHINE)
    for node in gm.graph.nodes:
        if "combine_v2" in str(node.target):
            node.meta["stream"] = "side"
    problems = prove(schedule_of(gm.graph, MACHINE.aic, MACHINE.aiv)).problems
    assert "collective_on_side_stream" in {problem.rule for problem in problems}


def test_super_kernels_stop_at_a_collective():
    gm = spread_experts()
    machine = dataclasses.replace(MACHINE, launch=1e-3)
    result, scopes = MergeSuperKernels().run(gm, machine, SuperKernelPolicy())
    assert not any("distribute" in node for scope in scopes for node in scope.nodes)
    assert "OP_UNSUPPORT" in {refusal.rule for refusal in result.refusals}


@needs_wheel
@pytest.mark.parametrize("mxfp4", [False, True])
def test_group_and_place_are_read_back_from_the_protobuf(mxfp4):
    case = cases.moe_case("situ", mxfp4=mxfp4, width=1024, decode=True)
    lowered = case.lower("ascend-950", torch.bfloat16, ExpertParallel(3, 1, "experts"))
    graph = ge.convert(lowered.graph_module, {}, soc="ascend-950", cann_version="9.0.0", name="ep")
    nodes = {op.type: op for op in ge.read_graph(graph.proto).op}
    for kind in ("MoeDistributeDispatchV2", "MoeDistributeCombineV2"):
        attributes = nodes[kind].attr
        assert attributes["group_ep"].s == b"experts"
        assert (attributes["ep_world_size"].i, attributes["ep_rank_id"].i) == (3, 1)
        assert attributes["moe_expert_num"].i == 6
    assert nodes["MoeDistributeDispatchV2"].attr["quant_mode"].i == (4 if mxfp4 else 0)
