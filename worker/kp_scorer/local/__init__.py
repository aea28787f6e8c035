"""The Redis that the package starts itself, and how the processes of one user find it."""
