"""Text to tokens and back, where the artifact has a tokenizer.json."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from typing import Any

from hybridge.artifacts.artifact import Artifact
from hybridge.artifacts.errors import RunError

_USE_IDS = "give token ids instead of text (--ids)"
_INCOMPLETE = "\ufffd"  # what a decoder gives for a character whose bytes are not all there


class Text:
    """A tokenizer; make it with `load_text`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, token_ids: Iterable[int]) -> Iterator[str]:
        """Text piece by piece, as tokens come; a character split over tokens comes when whole.

        Only the tokens of the last piece and of the next are decoded each time: a decoder may treat
        the first token it sees in its own way, so the piece before gives the next its context.
        """
        tokens: list[int] = []
        context = given = 0  # first token of the last piece, and first not yet given
        for token in token_ids:
            tokens.append(token)
            before = self.decode(tokens[context:given])
            text = self.decode(tokens[context:])
            if not text.endswith(_INCOMPLETE) and len(text) > len(before):
                yield text[len(before) :]
                context, given = given, len(tokens)
        before = self.decode(tokens[context:given])
        rest = self.decode(tokens[context:])[len(before) :]
        if rest:
            yield rest


def load_text(artifact: Artifact) -> Text:
    """The artifact's tokenizer.

    Raises:
        RunError: the artifact has none, or the ``tokenizers`` package is not installed.
    """
    name = artifact.manifest.tokenizer
    if name is None:
        raise RunError(
            "the artifact has no tokenizer: its checkpoint had no tokenizer.json", _USE_IDS
        )
    if importlib.util.find_spec("tokenizers") is None:
        raise RunError(
            "text needs the tokenizers package, which is not installed",
            f"pip install 'hybridge[text]', or {_USE_IDS}",
        )
    from tokenizers import Tokenizer

    try:
        return Text(Tokenizer.from_str(artifact.read(name).decode("utf-8")))
    except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
        raise RunError(f"{name}: not a usable tokenizer: {error}", _USE_IDS) from error
