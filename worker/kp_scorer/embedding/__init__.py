"""Text to unit vectors: the embedder's interface, tokens, the engines that run the model, and how settings choose one."""
