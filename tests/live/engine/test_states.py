from __future__ import annotations

import pytest
import torch

from isthmus.core.blocks import KVLayout
from isthmus.core.models import Delta
from isthmus.live.engine.batch import build_batch
from isthmus.live.engine.interface import Chunk
from isthmus.live.engine.kv import KVMemory
from isthmus.live.engine.states import LiveStates, Recurrence

CPU = torch.device("cpu")
HEADS = Delta("gdn", num_keys=1, num_values=2, key_dim=4, value_dim=3, taps=3)
LAYERS, SLOTS, SIZE = 3, 5, 4
STATE = 4 * LAYERS * HEADS.state_numbers
LAYOUT = KVLayout("bfloat16", SIZE, num_layers=2, num_kv_heads=1, head_dim=8, state_bytes=STATE)


@pytest.fixture
def states() -> LiveStates:
    states = LiveStates(HEADS, LAYERS, SLOTS, LAYOUT, CPU)
    states._live_SLX.copy_(torch.arange(states._live_SLX.numel()).view(states._live_SLX.shape))
    return states


def chunk(start: int, stop: int, slot: int, **fields: object) -> Chunk:
    return Chunk(range(start, stop), start, range(40), False, slot=slot, **fields)


def blocks(first: int) -> tuple[int, ...]:
    return tuple(range(first, first + LAYOUT.state_blocks))


def plan_of(states: LiveStates, *chunks: Chunk) -> Recurrence:
    plan = build_batch(chunks, SIZE, CPU, states).recurrence
    assert plan is not None
    return plan


def test_a_model_without_states_plans_nothing() -> None:
    assert build_batch([chunk(0, 3, 0)], SIZE, CPU).recurrence is None


def test_single_tokens_step_and_longer_chunks_are_cut_where_snapshots_are_taken(states: LiveStates) -> None:
    assert LAYOUT.state_blocks > 1
    plan = plan_of(
        states,
        chunk(10, 30, 4, snapshots=((11, blocks(0)), (16, blocks(10)))),
        chunk(7, 8, 2),
        chunk(0, 3, 1),
        chunk(8, 9, 0, snapshots=((9, blocks(20)),)),
        chunk(5, 6, 3),
    )
    assert plan.slots_R.tolist() == [2, 3]
    found = [(each.first, each.last, each.slot) for each in plan.stretches]
    assert found == [(2, 5, 1), (5, 6, 0), (6, 7, 4), (7, 12, 4), (12, 26, 4)]
    taken = [each.snapshot.blocks if each.snapshot else None for each in plan.stretches]
    assert taken == [None, blocks(20), blocks(0), blocks(10), None]
    assert (plan.fresh, plan.restores) == ([1], [])


def test_a_chunk_to_the_end_of_its_last_snapshot_has_no_empty_stretch(states: LiveStates) -> None:
    plan = plan_of(states, chunk(0, 9, 0, snapshots=((4, blocks(0)), (9, blocks(10)))))
    assert [(each.first, each.last) for each in plan.stretches] == [(0, 4), (4, 9)]


def test_states_begin_at_zero_or_where_their_blocks_say(states: LiveStates) -> None:
    memory, before = KVMemory(LAYOUT, 40, CPU), states._live_SLX.clone()
    snapshot = states._snapshot(blocks(7))
    for layer in range(LAYERS):
        states.take(snapshot, layer, 4)
    memory.write_blocks(snapshot.blocks, snapshot.data)
    plan = plan_of(states, chunk(0, 3, 1), chunk(9, 20, 0, restore=blocks(7)), chunk(9, 10, 2))
    for _ in range(2):  # as when the step is repeated
        plan.begin(memory)
        assert not states._live_SLX[1].any()
        assert torch.equal(states._live_SLX[0], before[4])
        assert torch.equal(states._live_SLX[2:], before[2:])


def test_a_snapshot_is_all_layers_in_order_and_zeros_after_them(states: LiveStates) -> None:
    memory = KVMemory(LAYOUT, 40, CPU)
    memory.write_blocks(
        blocks(7), torch.full((LAYOUT.state_blocks * LAYOUT.block_bytes,), 255, dtype=torch.uint8)
    )
    plan = plan_of(states, chunk(3, 6, 2, snapshots=((6, blocks(7)),)))
    (stretch,) = plan.stretches
    assert stretch.snapshot is not None
    for layer in range(LAYERS):
        states.take(stretch.snapshot, layer, stretch.slot)
    plan.finish(memory)
    data = bytes(memory.read_blocks(blocks(7)).numpy())
    expected = b"".join(states._live_SLX[2, layer].numpy().tobytes() for layer in range(LAYERS))
    assert len(expected) == STATE
    assert data[:STATE] == expected and not any(data[STATE:])


def test_the_next_iteration_goes_on_without_restores_and_snapshots(states: LiveStates) -> None:
    chunks = [
        Chunk([1], 8, range(40), True, slot=3, snapshots=((9, blocks(20)),)),
        Chunk([2], 8, range(40), True, slot=1, restore=blocks(30)),
        Chunk([3], 0, range(40), True, slot=0),
    ]
    batch = build_batch(chunks, SIZE, CPU, states)
    assert batch.order == [1, 2, 0]
    batch.advance([4, 5, 6])
    plan = batch.recurrence
    assert plan is not None and plan.slots_R.tolist() == [1, 0, 3]
    assert (plan.stretches, plan.fresh, plan.restores) == ([], [], [])


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(1, 2, 0), chunk(1, 2, 0)],
        [chunk(1, 2, SLOTS)],
        [chunk(1, 2, -1)],
        [chunk(1, 5, 0, snapshots=((1, blocks(0)),))],
        [chunk(1, 5, 0, snapshots=((6, blocks(0)),))],
        [chunk(1, 5, 0, snapshots=((3, blocks(0)), (3, blocks(9))))],
        [chunk(1, 5, 0, snapshots=((3, (1,)),))],
    ],
)
def test_what_no_scheduler_may_ask_is_caught(states: LiveStates, chunks: list[Chunk]) -> None:
    with pytest.raises(AssertionError):
        plan_of(states, *chunks)
