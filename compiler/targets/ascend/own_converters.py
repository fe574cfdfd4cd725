"""GE converters for the operators that the wheel has none for, made from their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from hybridge.compiler.targets.ascend.own_operators import (
    OWN_OPERATORS,
    WHEEL_OPERATORS,
    OwnOperator,
)

Definition = tuple[list[Any], list[Any], list[Any]]


def definitions() -> dict[str, Definition]:
    """What the stand-in answers when torchair asks whether an operator exists."""
    known: dict[str, Definition] = {name: ([], [], []) for name in WHEEL_OPERATORS}
    for op in OWN_OPERATORS.values():
        inputs = [(name, "required") for name in op.inputs.values()]
        outputs = [(name, "required") for name in op.outputs]
        attributes = [(name, kind) for name, kind in op.attributes.values()]
        known[op.ge_type] = (inputs, outputs, attributes)
    return known


def register_own_converters() -> None:
    """Tell torchair how each own operator becomes a GE node; torchair must be importable."""
    from torchair import register_fx_node_ge_converter

    for op in OWN_OPERATORS.values():
        overload = getattr(torch.ops.hybridge_ascend, op.name).default
        register_fx_node_ge_converter(overload)(_converter(op))
    overload = torch.ops.hybridge_ascend.paged_mla_attention.default
    register_fx_node_ge_converter(overload)(_paged_mla_attention)
    overload = torch.ops.npu.npu_recurrent_gated_delta_rule.default
    register_fx_node_ge_converter(overload)(_recurrent_gated_delta_rule)
    overload = torch.ops.npu.npu_scatter_pa_kv_cache_functional.default
    register_fx_node_ge_converter(overload)(_scatter_pa_kv_cache)
    overload = torch.ops.npu.npu_mla_prolog_v3_functional.default
    register_fx_node_ge_converter(overload)(_mla_prolog)


def _converter(op: OwnOperator) -> Callable[..., Any]:
    schema = getattr(torch.ops.hybridge_ascend, op.name).default._schema
    names = [argument.name for argument in schema.arguments]

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        import torchair
        from torchair.ge import attr

        given = {**dict(zip(names, args, strict=False)), **kwargs}
        attributes = {
            ge_name: getattr(attr, kind)(given[name])
            for name, (ge_name, kind) in op.attributes.items()
        }
        attributes |= {name: getattr(attr, kind)(v) for name, (kind, v) in op.fixed.items()}
        results = torchair.ge.custom_op(
            op.ge_type,
            inputs={ge_name: given[name] for name, ge_name in op.inputs.items()},
            outputs=list(op.outputs),
            attrs=attributes,
        )
        results = results if isinstance(results, list | tuple) else [results]
        kept = [results[i] for i in op.returns]
        return kept[0] if len(kept) == 1 else tuple(kept)

    convert.__name__ = f"convert_{op.name}"
    return convert


def _paged_mla_attention(
    query: Any,
    key: Any,
    query_rope: Any,
    key_rope: Any,
    query_ends: Any,
    key_lengths: Any,
    block_table: Any,
    mask: Any,
    scale: float,
    meta_outputs: Any = None,
) -> Any:
    """FusedInferAttentionScore by the wheel's own GE function, with lengths as tensors.

    Keys are [blocks, block, D] ("BnBsH"); the value is the key.
    """
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge._ge_graph import DataType

    blocks, size, _, width = key.symsize
    flat = [
        ge.Reshape(cache, ge.Const([blocks, size, columns], dtype=DataType.DT_INT64))
        for cache, columns in ((key, width), (key_rope, key_rope.symsize[3]))
    ]
    lengths = [ge.Cast(x, dst_type=DataType.DT_INT64) for x in (query_ends, key_lengths)]
    given = {
        "query": query,
        "key": [flat[0]],
        "value": [flat[0]],
        "atten_mask": mask,
        "actual_seq_lengths": lengths[0],
        "actual_seq_lengths_kv": lengths[1],
        "block_table": block_table,
        "query_rope": query_rope,
        "key_rope": flat[1],
        "num_heads": query.symsize[1],
        "scale": scale,
        "input_layout": "TND",
        "num_key_value_heads": 1,
        "sparse_mode": 3,
        "block_size": size,
    }
    output, _ = ge.FusedInferAttentionScore(
        **_with_absent_inputs(ge.FusedInferAttentionScore, given)
    )
    return output


def _with_absent_inputs(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given`, and None for every other input that the wheel's version of a GE function has."""
    parameters = inspect.signature(function).parameters.values()
    absent = {p.name: None for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    return {**absent, **given}


def _scatter_pa_kv_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    *,
    cache_mode: str = "PA_NZ",
    meta_outputs: Any = None,
) -> Any:
    """In place, like `_mla_prolog`."""
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge._ge_graph import dont_prune_me

    written = ge.ScatterPaKvCache(
        *(key, key_cache, slot_mapping, value, value_cache),
        compress_lens=None,
        compress_seq_offsets=None,
        seq_lens=None,
        cache_mode=cache_mode,
        scatter_mode="None",
        strides=[1, 1],
        offsets=[0, 0],
    )
    dont_prune_me(written[0])
    return written


_PROLOG_OPTIONAL = (
    *("cache_index", "dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr"),
    *("dequant_scale_w_dkv_kr", "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq"),
    *("actual_seq_len", "k_nope_clip_alpha"),
)


def _mla_prolog(
    *tensors: Any,
    meta_outputs: Any = None,
    **options: Any,
) -> Any:
    """The functional twin without the copies that the wheel's converter makes of both caches.

    Where torchair sees that nobody needs the cache from before, it uses the in-place operator too;
    here `convert.py` makes every later reader read what this returns.
    """
    from torchair._ge_concrete_graph import ge_apis as ge

    given = {name: value for name, value in options.items() if not name.endswith("_dtype")}
    absent = {name: None for name in _PROLOG_OPTIONAL if name not in given}
    query, rope, cache, rope_cache, scale, normed, normed_scale = ge.MlaPrologV3(
        *tensors, **absent, **given
    )
    return query, rope, scale, normed, normed_scale, cache, rope_cache


def _recurrent_gated_delta_rule(
    query: Any,
    key: Any,
    value: Any,
    state: Any,
    *,
    beta: Any = None,
    scale: float | None = None,
    actual_seq_lengths: Any = None,
    ssm_state_indices: Any = None,
    num_accepted_tokens: Any = None,
    g: Any = None,
    gk: Any = None,
    meta_outputs: Any = None,
) -> Any:
    """The in-place operator, which returns one value; the wheel's converter gives two for it."""
    from torchair._ge_concrete_graph import ge_apis as ge

    return ge.RecurrentGatedDeltaRule(
        *(query, key, value, beta, state, actual_seq_lengths, ssm_state_indices),
        g=g,
        gk=gk,
        num_accepted_tokens=num_accepted_tokens,
        scale=scale,
    )[0]
