"""GE operators of the CANN operator library that the torch-npu wheel has no converter for.

Each is declared once: its torch schema (namespace `hybridge_ascend`), its GE type with the names of
inputs, outputs and attributes, the SoCs that its documentation lists, and that source. From this
come the torch op, the converter (`own_converters.py`) and the answer to torchair's question whether
the operator exists. That an installed CANN really has one is known only on a device; the artifact
lists every such question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

A3, ASCEND_950 = "ascend-a3", "ascend-950"


@dataclass(frozen=True)
class OwnOperator:
    """One GE operator and the torch op that stands for it.

    Attributes:
        name: of the torch op in the namespace `hybridge_ascend`.
        signature: the torch schema after the name.
        ge_type: the GE operator type.
        inputs: torch argument -> GE input name, in the GE operator's order.
        outputs: GE output names in order.
        returns: which of the outputs the torch op returns.
        attributes: torch argument -> (GE attribute, its type "Int", "Float", "Bool" or "Str").
        fixed: further GE attributes with constant values: name -> (type, value).
        socs: where the documentation says that it runs.
        source: where the signature is from.
        in_place: the torch argument that it writes to, or None.
    """

    name: str
    signature: str
    ge_type: str
    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    returns: tuple[int, ...]
    attributes: Mapping[str, tuple[str, str]]
    socs: frozenset[str]
    source: str
    fixed: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    in_place: str | None = None


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_TRANSFORMER = "github.com/hicann/ops-transformer"

OWN_OPERATORS: dict[str, OwnOperator] = {
    op.name: op
    for op in (
        OwnOperator(
            name="block_attn_res_prepare",
            signature="(Tensor block_res, Tensor valid_blocks, Tensor pseudo_query, float eps)"
            " -> (Tensor, Tensor, Tensor)",
            ge_type="BlockAttnResPrepare",
            inputs=_same("block_res", "valid_blocks", "pseudo_query"),
            outputs=("numerator", "logit_max", "exp_sum"),
            returns=(0, 1, 2),
            attributes={"eps": ("eps", "Float")},
            socs=frozenset({ASCEND_950}),
            source=f"{_TRANSFORMER} attention/block_attn_res_prepare/README.md",
        ),
        OwnOperator(
            name="block_attn_res_update",
            # It updates partial_block in place; the lowering hands it a tensor of its own.
            signature="(Tensor partial_block, Tensor delta, Tensor pseudo_query, Tensor numerator, "
            "Tensor logit_max, Tensor exp_sum, float eps) -> (Tensor, Tensor)",
            ge_type="BlockAttnResUpdate",
            inputs=_same(
                *("partial_block", "delta", "pseudo_query", "numerator", "logit_max", "exp_sum")
            ),
            outputs=("partial_block", "h"),
            returns=(0, 1),
            attributes={"eps": ("eps", "Float")},
            socs=frozenset({ASCEND_950}),
            source=f"{_TRANSFORMER} attention/block_attn_res_update/README.md",
        ),
        OwnOperator(
            name="chunk_kda_fwd",
            signature="(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor a_log, "
            "Tensor dt_bias, Tensor initial_state, Tensor cu_seqlens, float scale, int chunk_size, "
            "bool safe_gate, float lower_bound) -> (Tensor, Tensor)",
            ge_type="ChunkKdaFwd",
            inputs=_same(
                *("q", "k", "v", "g", "beta", "a_log", "dt_bias", "initial_state", "cu_seqlens")
            ),
            outputs=(
                *("attn_out", "final_state", "gk", "Aqk", "Akk"),
                *("w", "u", "qg", "kg", "v_new", "h"),
            ),
            returns=(0, 1),
            attributes={
                "scale": ("scale", "Float"),
                "chunk_size": ("chunk_size", "Int"),
                "safe_gate": ("safe_gate", "Bool"),
                "lower_bound": ("lower_bound", "Float"),
            },
            fixed={
                "layout": ("Str", "TND"),
                "use_gate_in_kernel": ("Bool", True),
                "state_v_first": ("Bool", True),
            },
            socs=frozenset({A3, ASCEND_950}),
            source=f"{_TRANSFORMER} attention/chunk_kda_fwd/README.md",
        ),
        OwnOperator(
            name="causal_conv1d",
            signature="(Tensor x, Tensor weight, Tensor(a!) conv_states, Tensor query_start_loc, "
            "Tensor cache_indices, Tensor has_initial_state, str activation, int null_block_id)"
            " -> Tensor",
            ge_type="CausalConv1d",
            inputs={
                "x": "x",
                "weight": "weight",
                "conv_states": "conv_states",
                "query_start_loc": "query_start_loc",
                "cache_indices": "cache_indices",
                "has_initial_state": "initial_state_mode",
            },
            outputs=("conv_states", "y"),
            returns=(1,),
            attributes={
                "activation": ("activation_mode", "Str"),
                "null_block_id": ("null_block_id", "Int"),
            },
            socs=frozenset({ASCEND_950}),
            source=f"{_TRANSFORMER} causal_conv1d_proto.h; docs of "
            "cann_ops_transformer.causal_conv1d_fn",
            in_place="conv_states",
        ),
        OwnOperator(
            name="situ_glu",
            signature="(Tensor x, float beta, float linear_beta) -> Tensor",
            ge_type="SituGlu",
            inputs=_same("x"),
            outputs=("y",),
            returns=(0,),
            attributes={"beta": ("beta", "Float"), "linear_beta": ("linear_beta", "Float")},
            fixed={"dim": ("Int", -1), "activate_left": ("Bool", True)},
            socs=frozenset({A3, ASCEND_950}),
            source="CANN operator specifications, SituGlu (ops-nn activation/situ_glu)",
        ),
    )
}

# Built by a converter of its own on top of the wheel's GE function; declared for torch only.
PAGED_MLA_ATTENTION = (
    "paged_mla_attention(Tensor query, Tensor key, Tensor query_rope, Tensor key_rope, "
    "Tensor query_ends, Tensor key_lengths, Tensor block_table, Tensor mask, float scale) -> Tensor"
)

# Operators that only the wheel's converters name, for which torchair asks whether they exist.
WHEEL_OPERATORS = (
    "LightningIndexer",
    "QuantLightningIndexer",
    "SparseFlashAttention",
    "KvQuantSparseFlashAttention",
)
