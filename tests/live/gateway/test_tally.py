from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from isthmus.live.gateway.metrics import Tally

BOUNDS = (0.5, 1, 2.5)
VALUES = (0.0, 0.5, 0.75, 1.0, 2.0, 99.0)


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_it_reads_like_the_library_s_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("t", "Text.", BOUNDS)
    ours.register(tally)
    histogram = Histogram("t", "Text.", buckets=BOUNDS, registry=theirs)
    for value in VALUES:
        tally.observe(value, times=2)
        histogram.observe(value)
        histogram.observe(value)
    assert lines(ours) == lines(theirs)
