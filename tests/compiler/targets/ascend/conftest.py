"""Models of legal dimensions for the Ascend operators, as small as these allow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hybridge.compiler import compile_model
from hybridge.compiler.targets.ascend import stand_in
from hybridge.compiler.targets.ascend.options import AscendOptions
from hybridge.models.config import DsaConfig, ModelConfig
from hybridge.models.new_checkpoint import write_checkpoint
from hybridge.models.presets import preset, scale

BLOCK = 16


def legal_config(*, dtype: str = "bfloat16", mxfp4: bool = False) -> ModelConfig:
    """kimi-k3.1-tiny of three KDA layers and a DSA layer, with head sizes that the operators take."""
    tiny = scale(preset("kimi-k3.1-tiny"), layers=4)
    legal = dataclasses.replace(
        tiny,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dsa=DsaConfig(num_heads=8, head_dim=128, top_k=8, norm_eps=1e-5),
        num_heads=4,
    )
    if mxfp4:
        # Inner axes of an MXFP4 product are 128 and more; the rest is what the MLA prolog takes.
        moe = dataclasses.replace(legal.moe, intermediate_size=128, latent_size=128)
        legal = dataclasses.replace(
            legal,
            moe=moe,
            hidden_size=1024,
            qk_nope_head_dim=128,
            q_lora_rank=1536,
            num_heads=3,
        )
    return scale(legal, dtype=dtype, mxfp4=mxfp4)


@pytest.fixture(scope="session")
def legal_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of `legal_config`: "bfloat16", "float32" and "mxfp4"."""
    folder = tmp_path_factory.mktemp("legal")
    for name in ("bfloat16", "float32", "mxfp4"):
        packed = name == "mxfp4"
        config = legal_config(dtype="bfloat16" if packed else name, mxfp4=packed)
        write_checkpoint(config, folder / name, seed=3)
    return {name: folder / name for name in ("bfloat16", "float32", "mxfp4")}


def compile_legal(
    checkpoint: Path,
    out: Path,
    soc: str,
    *,
    weights: str | None = None,
    phases: tuple[str, ...] = ("prefill", "decode"),
    **options: object,
) -> Path:
    """Compile for small buckets: two decode graphs and one prefill graph."""
    chosen = AscendOptions(
        soc,
        **{
            "decode_sequences": (1, 3),
            "prefill_tokens": (32,),
            "prefill_sequences": 2,
            "blocks": 12,
            "columns": 4,
            "slots": 3,
            "convert": stand_in.find_wheel() is not None,
            **options,
        },
    )
    compile_model(
        checkpoint,
        out,
        target=soc,
        phases=phases,
        weights=weights,
        block_size=BLOCK,
        ascend=chosen,
    )
    return out
