"""Turns text into unit vectors: the embedder's interface, tokens, the engines that run the model, and the choice of engine."""
