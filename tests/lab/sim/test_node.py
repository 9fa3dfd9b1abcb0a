from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import compile_cost, pipeline
from isthmus.core.scheduler import Piece, Run
from isthmus.core.types import RequestId, Role
from isthmus.lab.sim.links import SerialLink
from isthmus.lab.sim.node import SimNode, build_node
from isthmus.lab.sim.records import LinkRecord, SimJob
from isthmus.lab.sim.workloads import Request

from .cluster import CURVE, deployment, nodes

COST = compile_cost(CURVE)


def a_node(role: Role = Role.DECODE, **fields: object) -> SimNode:
    return build_node(deployment(nodes(role, 1, **fields)), 0)


def decodes(batch: int, context: int, steps: int) -> Run:
    return Run((), batch, context, steps, list)


def chunk(count: int, start: int = 0, *, samples: bool = True) -> Piece:
    return Piece(RequestId("0"), start, count, (), samples)


def ends_of_iterations(batch: int, context: int, steps: int, start: int) -> list[int]:
    elapsed, ends = 0, []
    for at in range(steps):
        elapsed += COST.step_ps((), batch, context + at * batch)
        ends.append(start + elapsed // 1000)
    return ends


@given(st.integers(1, 50), st.integers(50, 5000), st.integers(1, 200), st.data())
def test_a_run_ends_as_its_iterations_do_and_is_cut_between_them(
    batch: int, context: int, steps: int, data: st.DataObject
) -> None:
    node, ends = a_node(), ends_of_iterations(batch, context, steps, 7)
    assert node.begin(decodes(batch, context, steps), 7) == ends[-1]
    now = data.draw(st.one_of(st.integers(7, ends[-1]), st.sampled_from(ends)))
    first_after = next(end for end in ends if end >= now)
    cut = node.cut(now)
    assert cut == (None if first_after == ends[-1] else first_after)
    assert node.end(first_after) == (ends.index(first_after) + 1, [])
    assert node.record.busy_ns == first_after - 7
    assert node.record.tokens_decoded == batch * (ends.index(first_after) + 1)


def test_a_run_that_is_cut_twice_ends_at_the_earlier_end() -> None:
    node = a_node()
    ends = ends_of_iterations(2, 100, 50, 0)
    node.begin(decodes(2, 100, 50), 0)
    version = node.version
    assert node.cut(ends[20]) == ends[20]
    assert node.cut(ends[30]) is None
    assert node.cut(ends[3] - 1) == ends[3]
    assert node.version == version + 2


def test_iterations_that_take_no_time_are_over_at_once() -> None:
    free = msgspec.structs.replace(CURVE, decode_fixed_s=0.0, decode_sequence_s=0.0, decode_context_s=0.0)
    node = a_node(cost=free)
    assert node.begin(decodes(3, 100, 10), 5) == 5
    assert node.cut(5) == 5


def test_who_got_the_last_token_ends_with_the_run() -> None:
    node = a_node()
    jobs = [SimJob(index, Request(0, 10, output)) for index, output in enumerate((4, 9, 4))]
    for job in jobs:
        job.num_generated = 1
        node.admit(job)
        node.join(job)
    end = node.begin(decodes(3, 33, 3), 0)
    assert node.end(end) == (3, [jobs[0], jobs[2]])
    assert jobs[0].spans == [(0, 0, 3)]
    assert jobs[0].num_left == 0
    jobs[1].leave(node.steps)  # pre-empted: 5 tokens are left, of which its prefill brings one
    assert jobs[1].num_left == 5
    jobs[1].num_generated += 1
    node.admit(jobs[1])
    node.join(jobs[1])
    end = node.begin(decodes(1, 15, 4), end)
    assert node.end(end) == (4, [jobs[1]])
    assert jobs[1].spans == [(0, 0, 3), (0, 3, 7)]


def test_a_prompt_in_chunks_takes_the_sum() -> None:
    node = a_node(Role.PREFILL)
    expected = sum(COST.step_ps([(64, 32 + at * 64)], 0, 0) for at in range(3)) // 1000
    assert node.begin(Run((chunk(64, 32, samples=False),), 0, 0, 3, list), 11) == 11 + expected
    assert node.cut(12) is None, "a prompt's chunks are not broken off"
    assert node.end(11 + expected) == (3, [])
    assert node.record.tokens_prefilled == 192


def test_a_mixed_iteration_is_one_iteration() -> None:
    node = a_node(Role.MIXED)
    end = node.begin(Run((chunk(30),), 4, 200, 1, list), 0)
    assert end == COST.step_ps([(30, 0)], 4, 200) // 1000
    assert node.end(end) == (1, [])
    assert (node.steps, node.record.tokens_decoded) == (1, 4)


@pytest.mark.parametrize("stages", [2, 5])
def test_a_pipeline_group_is_free_before_its_last_chunk_is_done(stages: int) -> None:
    node = a_node(Role.PREFILL, pipeline=stages)
    times = [COST.step_ps([(100, at * 100)], 0, 0) for at in range(4)]
    occupancy, latency = pipeline(times, stages)
    end = node.begin(Run((chunk(100, samples=False),), 0, 0, 4, list), 0)
    assert end == occupancy // 1000
    assert node.tail_ns == (latency - occupancy) // 1000


def test_a_lane_moves_one_thing_after_the_other() -> None:
    record = LinkRecord("a node to device", "memory", 10**9)
    serial = SerialLink(record)
    assert serial.take(2 * 10**9, 5) == 5 + 2 * 10**9
    assert serial.take(10**9, 10**9) == 5 + 3 * 10**9
    assert serial.take(0, 10**9) == 5 + 3 * 10**9
    assert serial.take(10**9, 10**10) == 11 * 10**9
    assert (record.bytes_moved, record.busy_ns) == (4 * 10**9, 4 * 10**9)
