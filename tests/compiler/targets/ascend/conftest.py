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
from made_once import made_once

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
def legal_checkpoints(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, Path]:
    """Checkpoints of `legal_config`: "bfloat16", "float32", "mxfp4", and "short" of two KDA layers; read only."""
    plain = legal_config()
    configs = {
        "bfloat16": plain,
        "float32": legal_config(dtype="float32"),
        "mxfp4": legal_config(mxfp4=True),
        "short": scale(plain, layers=2),
    }

    def make(folder: Path) -> None:
        for name, config in configs.items():
            write_checkpoint(config, folder / name, seed=3)

    folder = made_once(tmp_path_factory, worker_id, "legal", make)
    return {name: folder / name for name in configs}


@pytest.fixture(scope="session", params=["ascend-950", "ascend-a3"])
def legal_artifact(
    request: pytest.FixtureRequest,
    legal_checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    worker_id: str,
) -> Path:
    """MXFP4 with every matrix as FRACTAL_NZ for 950, bf16 as it is the default for A3; read only."""
    soc = request.param
    checkpoint, nz = ("mxfp4", "all") if soc == "ascend-950" else ("bfloat16", "auto")

    def make(folder: Path) -> None:
        compile_legal(legal_checkpoints[checkpoint], folder, soc, nz=nz)

    return made_once(tmp_path_factory, worker_id, f"legal-{soc}", make)


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
