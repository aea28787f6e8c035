"""Text to unit vectors: the embedder's interface, tokens, the engines that run the model, and the choice by settings."""

from worker.embedding.embedder import MAX_TOKENS, Embedder
from worker.embedding.select import select_embedder

__all__ = ["MAX_TOKENS", "Embedder", "select_embedder"]
