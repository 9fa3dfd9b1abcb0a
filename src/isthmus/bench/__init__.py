"""What a user measures on his own machine: `isthmus bench NAME` and `isthmus profile`.

Measurements against other people's software and validations of ours are in `benchmarks/`, beside `src/`.
"""

from isthmus.core.errors import IsthmusError


class BenchError(IsthmusError):
    """The benchmark cannot go on, or its answers cannot be used; the message says which side and why."""
