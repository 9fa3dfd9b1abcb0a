from __future__ import annotations

from itertools import pairwise

import pytest

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.records import RequestRecord, RequestStatus
from isthmus.lab.sim.report.charts import chosen, describe, phases
from tests.lab.sim.report.results import record, replayed, result


def lengths_s(one: RequestRecord) -> dict[str, float]:
    return {step.name: (step.end_ns - step.start_ns) / NS_PER_S for step in phases(one, 10 * NS_PER_S)}


def test_the_phases_of_a_completed_request() -> None:
    assert lengths_s(record(prefill_ns=NS_PER_S)) == {
        "wait for prefill": 1.0,
        "load, fetch, others": 1.0,
        "prefill": 1.0,
        "hand-over": 0.5,
        "wait for the batch": 0.5,
        "decode": 4.0,
    }


def test_phases_follow_one_another_from_arrival_to_end() -> None:
    for one in replayed(600).records:
        steps = phases(one, 10**15)
        assert steps[0].start_ns == one.arrival_ns and steps[-1].end_ns == one.end_ns
        assert all(before.end_ns == after.start_ns for before, after in pairwise(steps))
        assert all(step.start_ns <= step.end_ns for step in steps)


def test_node_time_longer_than_the_prefill_leaves_nothing_for_loading() -> None:
    assert lengths_s(record(prefill_ns=9 * NS_PER_S))["load, fetch, others"] == 0


def test_a_request_that_is_never_handed_over_has_no_such_phase() -> None:
    names = lengths_s(record(times_s={"landed": -1, "joined": 4}))
    assert "hand-over" not in names
    assert names["decode"] == 5.0


def test_a_refused_request_ends_in_the_phase_it_was_refused_in() -> None:
    times_s = {"prefill_start": -1, "first_token": -1, "landed": -1, "joined": -1, "end": 3}
    assert lengths_s(record(status=RequestStatus.REFUSED, stage="prefill", times_s=times_s)) == {
        "wait for prefill": 2.0
    }
    assert lengths_s(record(status=RequestStatus.UNFINISHED, times_s=times_s | {"end": -1})) == {
        "wait for prefill": 9.0
    }


def test_median_and_worst_are_of_the_completed_ones() -> None:
    waits_s = [5.0, 1.0, 9.0, 3.0, 7.0]
    records = [record(index, times_s={"first_token": 2 + wait}) for index, wait in enumerate(waits_s)]
    records.append(record(5, status=RequestStatus.FAILED, times_s={"first_token": 99}))
    (_, median), (_, worst) = chosen(result(records), None)
    assert (median.index, worst.index) == (0, 2)
    assert chosen(result([records[5]]), None) == []


def test_a_request_can_be_asked_for() -> None:
    whole = result([record(0), record(1, cached_tokens=250)])
    ((_, found),) = chosen(whole, 1)
    assert describe(found, whole) == (
        "Request 1: 1,000 tokens in, 11 out, 25.0 % of the prompt cached, prefilled on p0, decoded on d0, "
        "first token after 3 s; completed."
    )
    with pytest.raises(ConfigError, match="no request 2; the workload has 2"):
        chosen(whole, 2)
