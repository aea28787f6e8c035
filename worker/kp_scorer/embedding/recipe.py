"""Recipes: which texts of a trace are embedded, how much of each counts, and how their vectors become one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kp_scorer.settings import RecipeName
from kp_scorer.trace import ReasoningTrace

MAX_TOKENS: Final = 512
"""Only this many leading tokens of a text count, special tokens included."""

_SEPARATOR: Final = "\x1e"
"""Between the passages of a text: ASCII's record separator, which BERT's normalizer drops from whatever text it is in."""


@dataclass(frozen=True, slots=True)
class Part:
    """One passage of a text."""

    max_tokens: int
    """So many tokens count, special tokens included."""
    keeps_end: bool
    """Of a longer passage the first and the last half count; otherwise the beginning alone."""
    weight: float
    """Of its unit vector in the sum that, normalised, is the text's vector."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """From a trace to the text that an embedder is given, and from that to its parts."""

    mark: str
    """Ends the name of the space: change it with whatever changes a vector, so that vectors of two recipes never mix."""
    parts: tuple[Part, ...]
    text: Callable[[ReasoningTrace], str]

    def passages(self, text: str) -> list[str]:
        """The passages of a text, one for each part; what is missing is empty."""
        if len(self.parts) == 1:
            return [text]
        found = text.split(_SEPARATOR, len(self.parts) - 1)
        return found + [""] * (len(self.parts) - len(found))

    @property
    def max_tokens(self) -> int:
        """Of its longest part."""
        return max(part.max_tokens for part in self.parts)


def _asked_and_did(trace: ReasoningTrace) -> str:
    return trace.task.objective.replace(_SEPARATOR, "") + _SEPARATOR + trace.did


TRACE: Final = Recipe("", (Part(MAX_TOKENS, False, 1.0),), lambda trace: trace.embedding_text)
"""The reference's: the objective and all contents, the first 512 tokens."""

ASKED_AND_DID: Final = Recipe(".asked_and_did.1", (Part(96, True, 0.6), Part(256, True, 0.4)), _asked_and_did)
"""The objective, and what was done, each by a vector of its own."""

RECIPES: Final[Mapping[RecipeName, Recipe]] = MappingProxyType({"trace": TRACE, "asked_and_did": ASKED_AND_DID})
