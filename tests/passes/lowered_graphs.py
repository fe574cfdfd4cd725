"""Small lowered graphs of realistic sizes: the indexer prolog, and experts beside a shared one."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hybridge.compiler.targets.ascend.operators import define_operators
from hybridge.ir.cost import Machine

BF16 = torch.bfloat16
MACHINE = Machine(cube=4e14, vector=1e13, memory=1.6e12, launch=2e-6, event=1e-6, aic=24, aiv=48)


def trace(function, **shapes) -> fx.GraphModule:
    """A graph of `function` on fake tensors; (shape) is bf16, (shape, dtype) is what it says."""
    define_operators()
    with FakeTensorMode():
        inputs = {}
        for name, value in shapes.items():
            typed = isinstance(value[-1], torch.dtype)
            shape, dtype = value if typed else (value, BF16)
            inputs[name] = torch.empty(shape, dtype=dtype)
        gm = make_fx(lambda *v: function(**dict(zip(inputs, v, strict=True))))(*inputs.values())
    for node, name in zip(list(gm.graph.nodes), inputs, strict=False):
        node.name = node.target = name
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def indexer_prolog(rows=16):
    """A latent row, then keys, queries and head weights of the indexer, as the lowering does."""

    def function(
        x, qr, wkv, gamma, latent, wk, wq, ww, norm, cache, slots, ends, lengths, table, after
    ):
        row = torch.ops.npu.npu_rms_norm(x @ wkv.t(), gamma, 1e-5)[0]
        torch.ops.npu.npu_scatter_nd_update_(latent.view(-1, 512), slots, row)
        keys = torch.nn.functional.layer_norm(x @ wk.t(), (128,), norm, norm, 1e-5)
        flat = cache.view(-1, 128)
        written = torch.ops.npu.npu_scatter_nd_update_(flat, slots, keys).view(cache.shape)
        query = (qr @ wq.t()).unflatten(-1, (32, 128))
        weights = (x @ ww.t()) * 0.015
        chosen, _ = torch.ops.npu.npu_lightning_indexer(
            *(query, written, weights),
            actual_seq_lengths_query=ends,
            actual_seq_lengths_key=lengths,
            block_table=table,
            layout_query="TND",
            layout_key="PA_BSND",
        )
        return chosen, x @ after.t()

    i32 = torch.int32
    return trace(
        function,
        x=(rows, 7168),
        qr=(rows, 1536),
        wkv=(512, 7168),
        gamma=(512,),
        latent=(65, 128, 1, 512),
        wk=(128, 7168),
        wq=(4096, 1536),
        ww=(32, 7168),
        norm=(128,),
        cache=(65, 128, 1, 128),
        slots=((rows, 1), i32),
        ends=((rows,), i32),
        lengths=((rows,), i32),
        table=((rows, 32), i32),
        after=(7168, 7168),
    )


def experts(rows=16, collective=False):
    """Routed experts whose result is added to a shared expert's."""

    def function(x, gate, up, down, shared_up, shared_down):
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(x.float() @ gate.t(), 16, norm_type=1)
        rows_, went, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x, ids, expert_num=64, active_num=ids.numel(), active_expert_range=[0, 64]
        )
        grouped = {"group_list": counts, "split_item": 3, "group_type": 0, "group_list_type": 1}
        (inner,) = torch.ops.npu.npu_grouped_matmul([rows_], [up], **grouped)
        hidden = torch.ops.hybridge_ascend.situ_glu(inner, 4.0, 25.0)
        (result,) = torch.ops.npu.npu_grouped_matmul([hidden], [down], **grouped)
        routed = torch.ops.npu.npu_moe_finalize_routing(
            result, None, None, None, weights.to(BF16), went, None, 2
        )
        mixed = torch.ops.hybridge_ascend.situ_glu(x @ shared_up.t(), 4.0, 25.0)
        return (routed + mixed @ shared_down.t()) * 2

    return trace(
        function,
        x=(rows, 7168),
        gate=((64, 7168), torch.float32),
        up=(64, 7168, 6144),
        down=(64, 3072, 7168),
        shared_up=(12288, 7168),
        shared_down=(7168, 6144),
    )


def spread_experts(rows=16, devices=4):
    """Routed experts that other devices hold, beside a shared expert that this one has."""

    def function(x, gate, up, down, shared_up, shared_down):
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(x.float() @ gate.t(), 16, norm_type=1)
        place = ("ep", devices, 0, gate.shape[0])
        rows_, _, whence, counts, received, _, _ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x, ids, *place, shared_expert_num=0
        )
        grouped = {"group_list": counts, "split_item": 3, "group_type": 0, "group_list_type": 1}
        (inner,) = torch.ops.npu.npu_grouped_matmul([rows_], [up], **grouped)
        hidden = torch.ops.hybridge_ascend.situ_glu(inner, 4.0, 25.0)
        (result,) = torch.ops.npu.npu_grouped_matmul([hidden], [down], **grouped)
        routed = torch.ops.npu.npu_moe_distribute_combine_v2(
            result, ids, whence, received, weights, *place, shared_expert_num=0
        )
        mixed = torch.ops.hybridge_ascend.situ_glu(x @ shared_up.t(), 4.0, 25.0)
        return (routed + mixed @ shared_down.t()) * 2

    return trace(
        function,
        x=(rows, 7168),
        gate=((64, 7168), torch.float32),
        up=(64 // devices, 7168, 6144),
        down=(64 // devices, 3072, 7168),
        shared_up=(12288, 7168),
        shared_down=(7168, 6144),
    )
