"""What a caller may choose for an Ascend target, and the static sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hybridge.artifacts.errors import UsageError
from hybridge.compiler.targets.ascend.constraints import SOCS
from hybridge.compiler.targets.ascend.lowerings.context import Bucket
from hybridge.models.batch import Phase
from hybridge.passes.assign_nz_layout import NzPolicy

NZ_MODES = ("auto", "off", "quantised", "all")

# What a size is called in `--buckets` -> in AscendOptions. The first two take several sizes.
BUCKETS = {
    "decode": "decode_sequences",
    "prefill": "prefill_tokens",
    "sequences": "prefill_sequences",
    "blocks": "blocks",
    "columns": "columns",
    "slots": "slots",
}
_SEVERAL: tuple[Phase, ...] = ("decode", "prefill")
_DYNAMIC = "dynamic"
_ASSUMED = {"decode": 16, "prefill": 1024}  # of a graph of open sizes, where no other is made


@dataclass(frozen=True)
class AscendOptions:
    """What a caller may choose for this target.

    Attributes:
        soc: "ascend-a3" or "ascend-950".
        cann_version: the CANN version that torchair is told.
        nz: "auto" (as the SoC's recipes do), "off", "quantised" or "all".
        streams: whether to use side streams. super_kernels: whether to mark scopes.
        decode_sequences: B (and T) of each decode graph.
        prefill_tokens: T of each prefill graph. prefill_sequences: their B.
        dynamic: phases that get a graph of open sizes too, or only that where they have no sizes.
        block_size: rows a cache block. blocks: N. columns: M. slots: recurrent states.
        expert_parallel: devices that share the experts. expert_rank: this one's place among them.
        convert: whether to make the GE graphs; without, the rest is made and the wheel not needed.
    """

    soc: str
    cann_version: str = "9.0.0"
    nz: str = "auto"
    streams: bool = True
    super_kernels: bool = True
    decode_sequences: tuple[int, ...] = (16,)
    prefill_tokens: tuple[int, ...] = (1024,)
    prefill_sequences: int = 4
    dynamic: tuple[Phase, ...] = ()
    block_size: int = 128
    blocks: int = 1024
    columns: int = 64
    slots: int = 16
    expert_parallel: int = 1
    expert_rank: int = 0
    convert: bool = True

    def __post_init__(self) -> None:
        if self.nz not in NZ_MODES:
            raise UsageError(f"unknown --nz {self.nz!r}", f"use one of {', '.join(NZ_MODES)}")
        if self.dynamic and self.expert_parallel > 1:
            raise UsageError(
                "--buckets: no dynamic graph where devices share experts: dispatch and combine are "
                "planned for a number of tokens a device, at most 512",
                "give static sizes for " + " and ".join(self.dynamic),
            )

    def buckets(self, phase: Phase) -> dict[str, Bucket]:
        """The graphs of a phase, by name: "decode", or "decode_b8" and so on where there are several."""
        decode = phase == "decode"
        sizes = self.decode_sequences if decode else self.prefill_tokens
        letter = "b" if decode else "t"
        found = {f"{phase}_{letter}{size}": self._bucket(decode, size) for size in sorted(sizes)}
        if phase in self.dynamic:
            assumed = max(sizes, default=_ASSUMED[phase])
            found[f"{phase}_dynamic"] = replace(self._bucket(decode, assumed), dynamic=True)
        return found if len(found) > 1 else dict.fromkeys([phase], *found.values())

    def _bucket(self, decode: bool, tokens: int) -> Bucket:
        sequences = tokens if decode else min(self.prefill_sequences, tokens)
        return Bucket(
            tokens=tokens,
            sequences=sequences,
            blocks=self.blocks,
            block_size=self.block_size,
            columns=self.columns,
            slots=self.slots,
            logits=sequences,
        )

    def nz_policy(self) -> NzPolicy:
        """What `assign_nz_layout` is to aim at."""
        if self.nz == "auto":
            return NzPolicy("all", only_where_needed=SOCS[self.soc].nz_only_where_needed)
        return NzPolicy(self.nz)


def parse_buckets(text: str) -> dict[str, Any]:
    """`decode=1/16,prefill=1024` as arguments of `AscendOptions`.

    Raises:
        UsageError: a part is not NAME=SIZE, or several sizes where there is one.
    """
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, numbers = part.partition("=")
        texts = numbers.split("/")
        if name in _SEVERAL and _DYNAMIC in texts:
            texts = [text for text in texts if text != _DYNAMIC]
            found["dynamic"] = (*found.get("dynamic", ()), name)
        sizes = [int(size) if size.isdigit() else 0 for size in texts]
        if name not in BUCKETS or min(sizes, default=1) < 1:
            raise UsageError(
                f"--buckets: cannot read {part!r}",
                f"write NAME=SIZE with {', '.join(BUCKETS)}; several sizes as decode=1/16, "
                "open ones as decode=dynamic",
            )
        if name not in _SEVERAL and len(sizes) > 1:
            raise UsageError(
                f"--buckets: {part!r} has {len(sizes)} sizes, and all graphs share the caches",
                f"give several sizes only for {' and '.join(_SEVERAL)}",
            )
        found[BUCKETS[name]] = tuple(sorted(set(sizes))) if name in _SEVERAL else sizes[0]
    return found
