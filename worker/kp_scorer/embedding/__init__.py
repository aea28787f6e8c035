"""Text to unit vectors: the embedder's interface, tokens, the engines that run the model, and how settings choose one."""

from kp_scorer.embedding.embedder import (
    MAX_TOKENS,
    RECIPES,
    TRACE,
    CheckedEmbedder,
    Embedder,
    PlainEmbedder,
    TokenizedText,
    Vector,
    Vectors,
)
from kp_scorer.embedding.select import is_embedder_installed, select_embedder, usable_cores

__all__ = [
    "MAX_TOKENS",
    "RECIPES",
    "TRACE",
    "CheckedEmbedder",
    "Embedder",
    "PlainEmbedder",
    "TokenizedText",
    "Vector",
    "Vectors",
    "is_embedder_installed",
    "select_embedder",
    "usable_cores",
]
