"""The ids of several texts at once."""

from collections.abc import Sequence

from kp_scorer.embedding.embedder import Ids
from kp_scorer.embedding.text_embedder import Tokens


def ids_of(tokens: Tokens, texts: Sequence[str], most: int | None = None, *, keep_end: bool = False) -> list[Ids]:
    return [tokens.row(text, most, keep_end=keep_end).ids for text in texts]
