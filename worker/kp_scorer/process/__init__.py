"""A worker process: the road of a message through it, its runtime, and its maintenance services.

The modules of the road are, in order, ``consumer``, ``delivery``, ``pipeline``, ``admission``, ``look_up``, ``embed``,
``commit``, ``acknowledge`` and ``publish``.
"""
