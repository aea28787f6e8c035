"""Text to unit vectors: the embedder's interface, tokens, the engines that run the model, and how settings choose one."""

from kp_scorer.embedding.checked import CheckedEmbedder
from kp_scorer.embedding.cores import usable_cores
from kp_scorer.embedding.embedder import Embedder, Vector, Vectors
from kp_scorer.embedding.recipe import MAX_TOKENS, RECIPES, TRACE
from kp_scorer.embedding.select import is_embedder_installed, select_embedder

__all__ = [
    "MAX_TOKENS",
    "RECIPES",
    "TRACE",
    "CheckedEmbedder",
    "Embedder",
    "Vector",
    "Vectors",
    "is_embedder_installed",
    "select_embedder",
    "usable_cores",
]
