"""How alike two prompts are, by the signatures of their embeddings.

A signature is a string of bits, one a random direction: on which side of it the prompt's embedding lies (sign random
projections; the table that they are made of is the engine's). The share of bits that differ is the angle between the
two embeddings over pi.
"""

from __future__ import annotations

import math

SIMILAR = 0.8
"""Prompts that are less alike take the normal path (SemShareKV's threshold)."""


def similarity(one: bytes, other: bytes) -> float:
    """The cosine that two signatures of one length stand for, at least 0. Exactly 1 for equal ones, 0 without any."""
    if len(one) != len(other):
        return 0.0
    differing = (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()
    return max(0.0, math.cos(math.pi * differing / (8 * len(one)))) if one else 0.0
