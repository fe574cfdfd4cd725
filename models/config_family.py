"""Which family a config is of: by its architecture, its model type, or the features of a bare text config."""

from __future__ import annotations

from typing import Final

from hybridge.models.config_section import Section, SharedFields
from hybridge.models.model_config import Family

_ARCHITECTURES: Final[dict[str, Family]] = {
    "KimiLinearForCausalLM": "kimi_linear",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "KimiK3ForCausalLM": "kimi_k3",
    "KimiK31ForConditionalGeneration": "kimi_k3.1",
    "KimiK31ForCausalLM": "kimi_k3.1",
}
_MODEL_TYPES: Final[dict[str, Family]] = {
    "kimi_linear": "kimi_linear",
    "kimi_k3": "kimi_k3",
    "kimi_k31": "kimi_k3.1",
    "kimi_k3_1": "kimi_k3.1",
    "kimi_k3.1": "kimi_k3.1",
}


def family_of(top: Section, text: Section, shared: SharedFields) -> Family:
    """The family by architecture, then model type, then the features of a bare text config.

    Raises:
        CheckpointError: neither is there or known, or the config's features contradict them.
    """
    declared = _declared_family(top)
    text.used.update(("architectures", "model_type"))
    has_dsa = shared.home("dsa_config").has("dsa_config")
    if declared == "kimi_k3.1" and not has_dsa:
        raise text.fail(
            "dsa_config",
            "is missing, but the architecture is Kimi K3.1",
            "add it (index_n_heads, index_head_dim, index_topk, dsa_layers), or correct "
            "'architectures'",
        )
    if declared == "kimi_k3" and has_dsa and "architectures" in top.values:
        raise text.fail(
            "dsa_config",
            "is given, but the architecture is Kimi K3, which has no sparse attention",
            "correct 'architectures' to KimiK31ForConditionalGeneration, or remove dsa_config",
        )
    if has_dsa:
        return "kimi_k3.1"
    if declared == "kimi_linear" and text.has("attn_res_block_size"):
        return "kimi_k3"  # a K3 text_config on its own calls itself kimi_linear
    return declared


def _declared_family(top: Section) -> Family:
    names = top.texts("architectures", default=[])
    model_type = top.value("model_type", default=None)
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if names:
        raise top.fail(
            "architectures",
            f"is {list(names)}",
            f"supported architectures: {', '.join(sorted(_ARCHITECTURES))}",
        )
    if isinstance(model_type, str) and model_type in _MODEL_TYPES:
        return _MODEL_TYPES[model_type]
    if model_type is None:
        raise top.fail("architectures", "is missing", "add it, or 'model_type'")
    raise top.fail(
        "model_type", f"is {model_type!r}", f"supported types: {', '.join(sorted(_MODEL_TYPES))}"
    )
