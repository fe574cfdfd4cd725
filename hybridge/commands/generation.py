"""One generation as `hybridge run` sees it: tokens and times as they come, and a report of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridge.artifacts import safetensors
from hybridge.artifacts.artifact import open_artifact
from hybridge.artifacts.errors import UsageError
from hybridge.runner import Engine
from hybridge.runner.text import Text, load_text


def open_text(artifact: Path, weights_dir: Path | None) -> Text:
    """The artifact's tokenizer; opened before the model, whose size depends on the prompt's.

    Raises:
        RunError: the artifact has none, or the package `tokenizers` is not installed.
    """
    return load_text(open_artifact(artifact, weights_dir=weights_dir))


@dataclass
class Generation:
    """A prompt, the tokens that followed, and how long they took."""

    prompt_ids: list[int]
    load_seconds: float
    token_ids: list[int] = field(default_factory=list)
    first_token_seconds: float = 0.0
    later_tokens_seconds: float = 0.0

    def watch(self, tokens: Iterator[int]) -> Iterator[int]:
        """Pass tokens on, noting each and when it came."""
        start = time.monotonic()
        for token in tokens:
            passed = time.monotonic() - start
            if self.token_ids:
                self.later_tokens_seconds = passed - self.first_token_seconds
            else:
                self.first_token_seconds = passed
            self.token_ids.append(token)
            yield token

    def document(self, text: Text | None, logits_file: Path | None) -> dict[str, Any]:
        """The JSON of `run`."""
        return {
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "text": None if text is None else text.decode(self.token_ids),
            "logits_file": None if logits_file is None else str(logits_file),
            "seconds": {
                "load": self.load_seconds,
                "first_token": self.first_token_seconds,
                "later_tokens": self.later_tokens_seconds,
            },
        }

    def describe(self, logits_file: Path | None) -> str:
        """A few words about it, for people."""
        parts = [f"loaded in {self.load_seconds:.2f} s"]
        if self.token_ids:
            parts.append(
                f"{len(self.prompt_ids)} prompt tokens and the first new one in "
                f"{self.first_token_seconds * 1000:.1f} ms"
            )
        if len(self.token_ids) > 1:
            each = self.later_tokens_seconds / (len(self.token_ids) - 1)
            parts.append(f"{len(self.token_ids) - 1} more at {each * 1000:.1f} ms each")
        if logits_file is not None:
            parts.append(f"logits of every position in {logits_file}")
        return "; ".join(parts)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before the work for it is done.

    Raises:
        UsageError: its folder is not there or not writable, or it is a folder itself.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path} cannot be written", "name a file in a folder that you may write")


def write_logits(engine: Engine, generation: Generation, path: Path) -> None:
    """Write `logits` [T, vocab] fp32 and `token_ids` [T] int32 of the prompt and the new tokens.

    The prompt goes through the prefill graph, the new tokens one by one through the decode graph.

    Raises:
        UsageError: the file cannot be written.
    """
    prompt = generation.prompt_ids
    tokens = [*prompt, *generation.token_ids]
    logits = engine.logits(tokens, engine.prefill_chunk, decode_from=len(prompt))
    try:
        safetensors.write(path, {"logits": logits, "token_ids": np.asarray(tokens, np.int32)})
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name another") from None
