"""Hardware rules as data: what each operator takes on each SoC, and who says so.

A lowering states facts (`heads=96`) about every operator it wants to emit; `violations` holds them
against the rules. Nothing is emitted while one is broken, and all that are broken are told at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hybridge.compiler.targets.ascend.own_operators import A3, ASCEND_950
from hybridge.ir.cost import Machine


@dataclass(frozen=True)
class Soc:
    """One SoC generation.

    Attributes:
        name: the target's name.
        ge_name: what the device calls itself; torchair's converters ask for it.
        aic: Cube cores of one device.
        aiv: Vector cores of one device.
        source: where the numbers are from.
        machine: rates that the passes compare times with. Orders of magnitude of the generation,
            ours, from public product data; no result depends on them but the choice of streams
            and super kernels.
        nz_only_where_needed: whether ND is read as fast as FRACTAL_NZ.
    """

    name: str
    ge_name: str
    aic: int
    aiv: int
    source: str
    machine: Machine
    nz_only_where_needed: bool


SOCS: dict[str, Soc] = {
    A3: Soc(
        A3,
        "Ascend910_9391",
        aic=24,
        aiv=48,
        source="cann-recipes-infer docs/cann/en/multi_stream_principles.md: 24 AIC, 48 AIV a die",
        machine=Machine(3.5e14, 1.0e13, 1.6e12, launch=2e-6, event=1e-6, aic=24, aiv=48),
        nz_only_where_needed=False,
    ),
    ASCEND_950: Soc(
        ASCEND_950,
        "Ascend950PR_9599",
        aic=32,
        aiv=64,
        source="cannbot_dsl mega_recurrent_kda README: 32 AIC on 950PR; two AIV an AIC (inferred)",
        machine=Machine(5.0e14, 1.5e13, 1.6e12, launch=2e-6, event=1e-6, aic=32, aiv=64),
        nz_only_where_needed=True,
    ),
}


class Allowed(Protocol):
    """A set of values that a fact may have."""

    def __contains__(self, value: object) -> bool: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class OneOf:
    """Exactly these values."""

    values: tuple[int | str | bool, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(map(str, self.values[:-1])) + f" or {self.values[-1]}" * (
            len(self.values) > 1
        ) or str(self.values[0])


@dataclass(frozen=True)
class Range:
    """Whole or real numbers from `low` to `high`, whole ones in steps of `step`."""

    low: float
    high: float
    step: int | None = None

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return self.step is None or value % self.step == 0

    def __str__(self) -> str:
        step = f", a multiple of {self.step}" if self.step else ""
        return f"{self.low:g} to {self.high:g}{step}"


@dataclass(frozen=True)
class AnyOf:
    """A value of one of several sets."""

    sets: tuple[Allowed, ...]

    def __contains__(self, value: object) -> bool:
        return any(value in allowed for allowed in self.sets)

    def __str__(self) -> str:
        return ", or ".join(map(str, self.sets))


@dataclass(frozen=True)
class Rule:
    """What one operator takes for one fact.

    Attributes:
        operator: the operator's name.
        fact: what is limited, in words that end up in messages.
        allowed: the values it takes.
        source: who says so.
        remedy: what a person can do about a violation.
        socs: where the rule holds.
    """

    operator: str
    fact: str
    allowed: Allowed
    source: str
    remedy: str
    socs: frozenset[str] = frozenset({A3, ASCEND_950})


@dataclass(frozen=True)
class Violation:
    """A rule that a graph breaks.

    Attributes:
        node: the graph node that asked for the operator.
        rule: the rule.
        found: the value it had.
    """

    node: str
    rule: Rule
    found: object

    def __str__(self) -> str:
        rule = self.rule
        return (
            f"{self.node}: {rule.operator}: {rule.fact} is {self.found}, must be {rule.allowed} "
            f"({rule.source}); {rule.remedy}"
        )


_LI = "github.com/hicann/ops-transformer attention/lightning_indexer/README.md"
_SFA = "op-plugin torch_npu-npu_sparse_flash_attention.md"
_FIA = "op-plugin torch_npu-npu_fused_infer_attention_score.md"
_RGDR = "github.com/hicann/ops-transformer attention/recurrent_gated_delta_rule/README.md"
_CHUNK = "github.com/hicann/ops-transformer attention/chunk_kda_fwd/README.md"
_CONV = "github.com/hicann/ops-transformer causal_conv1d_proto.h"
_PREPARE = "github.com/hicann/ops-transformer attention/block_attn_res_prepare/README.md"
_UPDATE = "github.com/hicann/ops-transformer attention/block_attn_res_update/README.md"
_GATE = "op-plugin torch_npu-npu_moe_gating_top_k.md"
_ROUTING = "op-plugin torch_npu-npu_moe_init_routing_v2.md"
_GMM = "op-plugin torch_npu-npu_grouped_matmul.md"
_GMM_FP4 = "torchair 2.13.0 ge_converter/custom/grouped_matmul.py"
_PROLOG = (
    "github.com/hicann/ops-transformer attention/mla_prolog_v3/docs/aclnnMlaPrologV3WeightNz.md"
)
_DISPATCH = "github.com/hicann/ops-transformer mc2/moe_distribute_dispatch_v2/docs (V3 interface)"
_MEGA = "cannbot_dsl mega_recurrent_kda README"

_BLOCK = Range(16, 1024, 16)
_ON_A3, _ON_950 = frozenset({A3}), frozenset({ASCEND_950})
_HEADS = OneOf((1, 2, 4, 8, 16, 32, 64, 128))
_OTHER_MODEL = "the model's shape has no operator here; compile for the CPU, or another checkpoint"
_ONE_DEVICE = "keep the experts on one device (--expert-parallel 1)"
_FEWER = "share the experts among fewer devices"
_PARTS = "none needed: its parts stay operators of their own"
_OTHER_BLOCK = "choose another --block-size"

RULES: tuple[Rule, ...] = (
    Rule("LightningIndexer", "head dimension", OneOf((128,)), _LI, _OTHER_MODEL),
    Rule("LightningIndexer", "key heads", OneOf((1,)), _LI, _OTHER_MODEL),
    Rule("LightningIndexer", "query heads", Range(1, 64), _LI, _OTHER_MODEL, _ON_A3),
    Rule(
        "LightningIndexer",
        "query heads",
        OneOf((8, 16, 24, 32, 64)),
        _LI,
        "pad the indexer's heads with zero weights",
        _ON_950,
    ),
    Rule("LightningIndexer", "block size", _BLOCK, _LI, _OTHER_BLOCK),
    Rule(
        "LightningIndexer",
        "sparse count",
        AnyOf((Range(1, 2048), OneOf((3072, 4096, 5120, 6144, 7168, 8192)))),
        _LI,
        "choose a top-k the operator has",
    ),
    Rule(
        "LightningIndexer",
        "head weights dtype",
        OneOf(("bfloat16", "float16")),
        _LI,
        "cast the head weights to the query's dtype",
        _ON_950,
    ),
    Rule("SparseFlashAttention", "latent dimension", OneOf((512,)), _SFA, _OTHER_MODEL),
    Rule("SparseFlashAttention", "rope dimension", OneOf((64,)), _SFA, _OTHER_MODEL),
    Rule(
        "SparseFlashAttention",
        "query heads",
        _HEADS,
        _SFA,
        "pad the heads with zero queries, or split them over devices",
    ),
    Rule("SparseFlashAttention", "block size", _BLOCK, _SFA, _OTHER_BLOCK),
    Rule("FusedInferAttentionScore", "latent dimension", OneOf((512,)), _FIA, _OTHER_MODEL),
    Rule("FusedInferAttentionScore", "rope dimension", OneOf((64,)), _FIA, _OTHER_MODEL),
    Rule(
        "FusedInferAttentionScore",
        "query heads",
        _HEADS,
        _FIA,
        "pad the heads with zero queries, or split them over devices",
    ),
    Rule("FusedInferAttentionScore", "block size", Range(16, 512, 16), _FIA, _OTHER_BLOCK),
    Rule(
        "MlaPrologV3",
        "hidden size",
        OneOf((1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)),
        _PROLOG,
        _PARTS,
    ),
    Rule("MlaPrologV3", "query rank", OneOf((1536, 2048)), _PROLOG, _PARTS),
    Rule("MlaPrologV3", "query heads", _HEADS, _PROLOG, _PARTS),
    Rule("MlaPrologV3", "latent dimension", OneOf((512,)), _PROLOG, _PARTS),
    Rule("MlaPrologV3", "plain dimension", OneOf((128, 192)), _PROLOG, _PARTS),
    Rule("MlaPrologV3", "rope dimension", OneOf((64,)), _PROLOG, _PARTS),
    Rule("MlaPrologV3", "block size", _BLOCK, _PROLOG, _OTHER_BLOCK),
    Rule("RecurrentGatedDeltaRule", "heads", Range(1, 256), _RGDR, "split the heads over devices"),
    Rule("RecurrentGatedDeltaRule", "key dimension", Range(1, 256), _RGDR, _OTHER_MODEL),
    Rule("RecurrentGatedDeltaRule", "value dimension", Range(1, 256), _RGDR, _OTHER_MODEL),
    Rule(
        "RecurrentGatedDeltaRule",
        "tokens a sequence",
        Range(1, 8),
        _RGDR,
        "use the chunked operator for longer runs",
    ),
    Rule("ChunkKdaFwd", "heads", Range(1, 128), _CHUNK, "split the heads over devices"),
    Rule("ChunkKdaFwd", "key dimension", Range(16, 256, 16), _CHUNK, _OTHER_MODEL),
    Rule("ChunkKdaFwd", "value dimension", Range(16, 256, 16), _CHUNK, _OTHER_MODEL),
    Rule("ChunkKdaFwd", "chunk size", OneOf((64, 128)), _CHUNK, "this is a bug in the lowering"),
    Rule(
        "ChunkKdaFwd",
        "sequences",
        Range(1, 1024),
        _CHUNK,
        "choose a smaller batch bucket (--buckets); padding tokens count as one sequence",
    ),
    Rule("ChunkKdaFwd", "gate lower bound", Range(-5.0, -1e-30), _CHUNK, _OTHER_MODEL),
    Rule("CausalConv1d", "taps", OneOf((2, 3, 4)), _CONV, _OTHER_MODEL),
    Rule("BlockAttnResPrepare", "blocks", Range(1, 64), _PREPARE, "use longer AttnRes blocks"),
    Rule("BlockAttnResPrepare", "hidden size", Range(1, 8192), _PREPARE, _OTHER_MODEL),
    Rule("BlockAttnResUpdate", "hidden size", Range(1, 8192), _UPDATE, _OTHER_MODEL),
    Rule("MoeGatingTopK", "experts", Range(1, 2048), _GATE, _OTHER_MODEL),
    Rule("MoeInitRoutingV3", "experts", Range(1, 10240), _ROUTING, _OTHER_MODEL),
    Rule("GroupedMatmul", "inner axis", Range(1, 65535), _GMM, "split the experts' width"),
    Rule("GroupedMatmul", "experts in MXFP4", Range(2, 10240), _GMM_FP4, _OTHER_MODEL),
    Rule(
        "GroupedMatmul",
        "MXFP4 inner axis",
        AnyOf((Range(128, 65472, 64),)),
        _GMM_FP4,
        "the axis that is summed over is a multiple of 64 and not 64 itself",
    ),
    Rule("MoeDistributeDispatchV2", "hidden size", Range(1024, 8192), _DISPATCH, _ONE_DEVICE),
    Rule(
        "MoeDistributeDispatchV2",
        "tokens a device",
        Range(1, 512),
        _DISPATCH,
        "choose a smaller bucket; longer prefills exchange rows with sizes known at run time only "
        "(all_to_all), which no static graph holds",
    ),
    Rule("MoeDistributeDispatchV2", "choices a token", Range(1, 16), _DISPATCH, _ONE_DEVICE),
    Rule("MoeDistributeDispatchV2", "experts", Range(1, 1024), _DISPATCH, _ONE_DEVICE),
    Rule("MoeDistributeDispatchV2", "devices", Range(2, 768), _DISPATCH, _FEWER, _ON_A3),
    Rule("MoeDistributeDispatchV2", "devices", Range(2, 1024), _DISPATCH, _FEWER, _ON_950),
    Rule(
        "MegaRecurrentKda", "batch", Range(16, 256, 16), _MEGA, "use a bucket of 16 rows", _ON_950
    ),
    Rule(
        "MegaRecurrentKda",
        "tokens a sequence",
        OneOf((8,)),
        _MEGA,
        "it verifies 7 drafts; plain decode uses RecurrentGatedDeltaRule",
        _ON_950,
    ),
    Rule("MegaRecurrentKda", "heads", OneOf((6,)), _MEGA, "96 heads over 16 devices", _ON_950),
    Rule("MegaRecurrentKda", "hidden size", OneOf((7168,)), _MEGA, _OTHER_MODEL, _ON_950),
    Rule("MegaRecurrentKda", "head dimension", OneOf((128,)), _MEGA, _OTHER_MODEL, _ON_950),
)


def violations(
    node: str, operator: str, soc: str, facts: dict[str, object], rules: Iterable[Rule] = RULES
) -> list[Violation]:
    """The rules of `operator` on `soc` that `facts` break."""
    return [
        Violation(node, rule, facts[rule.fact])
        for rule in rules
        if rule.operator == operator and soc in rule.socs and rule.fact in facts
        if facts[rule.fact] not in rule.allowed
    ]


def padded_heads(heads: int) -> int:
    """The next number of query heads that the attention operators take, or `heads` itself."""
    return next((n for n in _HEADS.values if isinstance(n, int) and n >= heads), heads)
