"""What every op becomes on each SoC, and from which source that is known: the table of docs/ascend.md.

A lowering says what it made of a site (`Context.became`); here stands everything that it may say. A form is
fused where one operator of the SoC (or a chain of them that is all there is) does the whole of it. Where a
SoC has no such operator the form says so, and the site counts neither for nor against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridge.compiler.targets.ascend.own_operators import A3, ASCEND_950

WHEEL = "torch-npu wheel"
OPS = "hicann/ops-transformer"
RECIPES = "hicann/cann-recipes-infer"


@dataclass(frozen=True)
class Form:
    """One way in which an op is lowered.

    Attributes:
        op: of the vocabulary, or a fusion that only this target has.
        socs: where. becomes: the operators, as the lowering reports them.
        source: from where the operators and their rules are known.
        fused: whether it is what the SoC has for it; False where a form of several operators is taken
            although there is one for other sites.
        exists: whether the SoC has an operator for it at all.
    """

    op: str
    socs: tuple[str, ...]
    becomes: str
    source: str
    fused: bool = True
    exists: bool = True


BOTH = (A3, ASCEND_950)
_HERE, _FAR = "npu_moe_init_routing_v2", "npu_moe_distribute_dispatch_v2"
_BACK, _FAR_BACK = "npu_moe_finalize_routing", "npu_moe_distribute_combine_v2"
_MX = "npu_dynamic_mx_quant + npu_grouped_matmul (MXFP8 x MXFP4)"
_FAR_SOURCE = f"{WHEEL}; {OPS} mc2; {RECIPES} kimi_k3"
_ATTN_RES = f"{OPS} block_attn_res_update; **own converter**"

FORMS: tuple[Form, ...] = (
    Form(
        "mla_prolog",
        BOTH,
        "npu_mla_prolog_v3",
        f"{WHEEL}; {OPS} mla_prolog_v3; {RECIPES} glm_5_2; **own converter**",
    ),
    Form("lightning_indexer", BOTH, "npu_lightning_indexer", f"{WHEEL}; {OPS} lightning_indexer"),
    Form("sparse_flash_attention", BOTH, "npu_sparse_flash_attention", f"{WHEEL}; op-plugin docs"),
    Form("mla_attention", BOTH, "FusedInferAttentionScore", f"{WHEEL}; op-plugin docs"),
    Form(
        "paged_write",
        BOTH,
        "npu_scatter_pa_kv_cache",
        f"{WHEEL}; {OPS} scatter_pa_kv_cache; **own converter**",
    ),
    Form("paged_write", BOTH, "npu_scatter_nd_update_", WHEEL),
    Form(
        "kda_prefill",
        (A3,),
        "gathers + ChunkKdaFwd",
        f"{OPS} chunk_kda_fwd; **own converter**",
    ),
    Form(
        "kda_prefill",
        (ASCEND_950,),
        "CausalConv1d + ChunkKdaFwd",
        f"{OPS} chunk_kda_fwd, causal_conv1d; **own converters**",
    ),
    Form(
        "kda_decode",
        (A3,),
        "gathers + npu_recurrent_gated_delta_rule + npu_rms_norm",
        f"{WHEEL}; {OPS} recurrent_gated_delta_rule",
    ),
    Form(
        "kda_decode",
        (ASCEND_950,),
        "CausalConv1d + npu_recurrent_gated_delta_rule + npu_rms_norm",
        f"{WHEEL}; {OPS} recurrent_gated_delta_rule, causal_conv1d; **own converter**",
    ),
    Form(
        "attn_res_prepare",
        (A3,),
        "matmuls and reductions",
        f"{OPS} block_attn_res_prepare: 950 only",
        exists=False,
    ),
    Form(
        "attn_res_prepare",
        (ASCEND_950,),
        "BlockAttnResPrepare",
        f"{OPS} block_attn_res_prepare; **own converter**",
    ),
    Form(
        "attn_res_update",
        (A3,),
        "reductions",
        f"{OPS} block_attn_res_update: 950 only",
        exists=False,
    ),
    Form("attn_res_update", (ASCEND_950,), "BlockAttnResUpdate", _ATTN_RES),
    Form(
        "attn_res_update_norm",
        (A3,),
        "reductions",
        f"{OPS} block_attn_res_update: 950 only",
        exists=False,
    ),
    Form("attn_res_update_norm", (ASCEND_950,), "BlockAttnResUpdate", _ATTN_RES),
    Form("attn_res_update_norm", BOTH, "npu_rms_norm", WHEEL),
    Form(
        "attn_res_add_update_norm",
        (A3,),
        "an add and reductions",
        f"{OPS} block_attn_res_update: 950 only",
        exists=False,
    ),
    Form("attn_res_add_update_norm", (ASCEND_950,), "BlockAttnResUpdate", _ATTN_RES),
    Form("attn_res_add_update_norm", BOTH, "npu_rms_norm", WHEEL),
    Form("moe_route", BOTH, "npu_moe_gating_top_k", f"{WHEEL}; {OPS} moe_gating_top_k"),
    Form(
        "moe_route",
        BOTH,
        "sigmoid + topk",
        f"{OPS} moe_gating_top_k: it always renormalises",
        exists=False,
    ),
    Form(
        "moe_experts", BOTH, f"{_HERE} + npu_grouped_matmul + {_BACK}", f"{WHEEL}; op-plugin docs"
    ),
    Form("moe_experts", BOTH, f"{_FAR} + npu_grouped_matmul + {_FAR_BACK}", _FAR_SOURCE),
    Form(
        "moe_experts_mxfp4",
        (A3,),
        f"{_HERE} + npu_grouped_matmul + {_BACK}",
        "no FP4 on A3: weights decoded to bf16 beforehand",
    ),
    Form(
        "moe_experts_mxfp4",
        (A3,),
        f"{_FAR} + npu_grouped_matmul + {_FAR_BACK}",
        f"no FP4 on A3; {_FAR_SOURCE}",
    ),
    Form(
        "moe_experts_mxfp4",
        (ASCEND_950,),
        f"{_HERE} + {_MX} + {_BACK}",
        f"{WHEEL}; {RECIPES} module/quantization/mxfp4.py",
    ),
    Form("moe_experts_mxfp4", (ASCEND_950,), f"{_FAR} + {_MX} + {_FAR_BACK}", _FAR_SOURCE),
    Form("rms_norm", BOTH, "npu_rms_norm", f"{WHEEL}; op-plugin docs"),
    Form("situ", BOTH, "SituGlu", "CANN operator list, SituGlu; **own converter**"),
    Form("linear", BOTH, "MatMulV2", WHEEL),
)


@dataclass(frozen=True)
class Coverage:
    """How much of a graph became what its SoC has.

    Attributes:
        sites: places that fusion passes found. fused: of these, lowered to the SoC's own operators.
        without_operator: of these, the SoC has none for.
    """

    sites: int
    fused: int
    without_operator: int

    @property
    def share(self) -> float:
        """Of the sites for which there is an operator, how many got it."""
        possible = self.sites - self.without_operator
        return self.fused / possible if possible else 1.0


def form_of(op: str, soc: str, becomes: str) -> Form:
    """The table's row for what a lowering reports.

    Raises:
        KeyError: the table has no such row: a lowering and the table disagree.
    """
    for form in FORMS:
        if (form.op, form.becomes) == (op, becomes) and soc in form.socs:
            return form
    raise KeyError(f"op_table has no form of {op} on {soc} that is {becomes!r}")


def coverage(sites: Mapping[str, Sequence[str]], soc: str) -> Coverage:
    """Count the sites of a lowered graph (`Lowered.sites`)."""
    forms = [form_of(op, soc, becomes) for op, found in sites.items() for becomes in found]
    return Coverage(
        sites=len(forms),
        fused=sum(form.fused and form.exists for form in forms),
        without_operator=sum(not form.exists for form in forms),
    )


def table() -> Iterator[str]:
    """The lines of the table in docs/ascend.md."""
    yield f"| op | {A3} | {ASCEND_950} | known from |"
    yield "|---|---|---|---|"
    for form in FORMS:
        text = form.becomes if form.exists else f"{form.becomes} (no operator)"
        cells = [text if soc in form.socs else "" for soc in BOTH]
        yield f"| `{form.op}` | {' | '.join(cells)} | {form.source} |"
