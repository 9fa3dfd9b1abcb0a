"""The closed form of a pipeline group against a step-by-step simulation of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import pipeline


def simulated(parts: list[int], stages: int) -> tuple[int, int]:
    """When the first and the last stage end, chunk by chunk: a chunk enters a stage when both are free."""
    free = [0] * stages
    for part in parts:
        ready = 0
        for stage in range(stages):
            free[stage] = ready = max(free[stage], ready) + part
    return free[0], free[-1]


@given(st.lists(st.integers(0, 10**15), max_size=20), st.integers(1, 9))
def test_occupancy_and_latency_are_those_of_the_simulation(parts: list[int], stages: int) -> None:
    assert pipeline([part * stages for part in parts], stages) == simulated(parts, stages)


@given(st.lists(st.integers(0, 10**6), max_size=20), st.integers(1, 9))
def test_times_that_do_not_divide_are_rounded_up(times: list[int], stages: int) -> None:
    occupancy, latency = pipeline(times, stages)
    assert sum(times) <= occupancy * stages < sum(times) + stages * max(len(times), 1)
    assert latency >= max([sum(times) / stages, *times])
