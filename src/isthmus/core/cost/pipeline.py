"""Chunked pipeline parallelism: a prompt's chunks through the stages of one group (Mooncake, FAST'25)."""

from __future__ import annotations

from collections.abc import Sequence


def pipeline(chunk_times_ps: Sequence[int], stages: int) -> tuple[int, int]:
    """(occupancy, latency) of a prompt whose chunks would take `chunk_times_ps` on one instance.

    A chunk's time is split evenly over the stages, rounded up, and a stage works on one chunk at a time, in
    order: a flow shop. Occupancy is when the first stage is free for another prompt; latency is when the last
    chunk leaves the last stage. Since a chunk takes the same time in each stage, the makespan is exactly
    sum + (stages - 1) * max: only the slowest chunk is waited for, once in each further stage.
    """
    assert stages >= 1
    parts = [-(-time // stages) for time in chunk_times_ps]
    if not parts:
        return 0, 0
    occupancy = sum(parts)
    return occupancy, occupancy + (stages - 1) * max(parts)
