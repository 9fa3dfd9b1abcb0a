"""Live states of the emulated engine and their snapshots: whatever is wrong with one shows in the tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import StartError
from isthmus.core.types import Sampling
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of
from isthmus.live.engine.interface import Chunk, Row, split_layers

SIZE, STATE_TOKENS = 4, 11
RECIPE = Recipe("model", layout_of(SIZE, state_tokens=STATE_TOKENS), 1 << 20)
COST = compile_cost(Curve(kv_token_bytes=1024, num_layers=8, prefill_token_s=1e-5))
ROW = Row(Sampling(temperature=0.0), ())
PROMPT = [random.Random(1).randrange(1000) for _ in range(19)]
BLOCKS = (7, 2, 3, 9, 5, 11, 0, 4)
STATE = (14, 12, 15)
"""The blocks of a snapshot: 11 tokens' worth in three blocks of four."""
OTHER = (16, 17, 18)
SNAPSHOT_AT = 12


def engine_of(recipe: Recipe = RECIPE, *, layers: tuple[int, int] | None = None) -> EmulatedEngine:
    return EmulatedEngine(recipe, COST, 20, max_length=1000, max_sequences=4, layers=layers)


def step(engine: EmulatedEngine, *chunks: Chunk) -> list[int]:
    batch = engine.build(chunks)
    return engine.step(batch, [ROW] * len(batch.order))[0]


def chunk_of(prompt: Sequence[int], start: int, stop: int, slot: int = 0) -> Chunk:
    return Chunk(prompt[start:stop], start, BLOCKS, stop == len(prompt), slot=slot)


def decoded(engine: EmulatedEngine, prompt: Sequence[int], first: int, count: int, slot: int = 0) -> list[int]:
    """`count` tokens, the first of which is given: the prompt is computed, and its state is in the slot."""
    known, found = [*prompt, first], [first]
    while len(found) < count:
        found += step(engine, Chunk(known[-1:], len(known) - 1, BLOCKS, True, True, slot=slot))
        known.append(found[-1])
    return found


def test_a_snapshot_fills_as_many_blocks_as_the_layout_says() -> None:
    assert RECIPE.layout.state_bytes == 2 * 16 * STATE_TOKENS
    assert RECIPE.layout.state_blocks == len(STATE)
    assert layout_of(SIZE).state_blocks == 0


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.lists(st.integers(1, 39), max_size=4),
    st.lists(st.integers(1, 39), max_size=2, unique=True),
    st.integers(0, 3),
)
def test_chunks_snapshots_and_slots_do_not_matter(
    prompt: list[int], cuts: list[int], wanted: list[int], slot: int
) -> None:
    engine, blocks = engine_of(), (*range(11), 19)
    step(engine, Chunk(PROMPT, 0, BLOCKS, True, slot=slot))  # what another request leaves in the slot
    edges = sorted({0, len(prompt), *(cut for cut in cuts if cut < len(prompt))})
    tables = dict(zip(sorted(wanted), (STATE, OTHER), strict=False))
    for start, stop in pairwise(edges):
        snapshots = tuple((at, table) for at, table in tables.items() if start < at <= stop)
        chunk = Chunk(prompt[start:stop], start, blocks, stop == len(prompt), slot=slot, snapshots=snapshots)
        tokens = step(engine, chunk)
    while len(tokens) < 4:
        at = len(prompt) + len(tokens) - 1
        tokens += step(engine, Chunk(tokens[-1:], at, blocks, True, True, slot=slot))
    assert tokens == expected_tokens(RECIPE, prompt, 4)
    for at, table in tables.items():
        if at < len(prompt):
            rest = Chunk(prompt[at:], at, blocks, True, slot=(slot + 1) % 4, restore=table)
            assert step(engine, rest) == tokens[:1]


def test_states_of_a_batch_do_not_mix_and_stay_with_their_requests() -> None:
    engine, prompts = engine_of(), [PROMPT[:6], PROMPT[:3], [*PROMPT[:5], 0]]
    tables, slots = [(0, 1, 2), (3, 4), (5, 6, 7)], (2, 0, 3)
    chunks = [
        Chunk(prompt, 0, table, True, slot=slot)
        for prompt, table, slot in zip(prompts, tables, slots, strict=True)
    ]
    found = [step(engine, *chunks)]
    decodes = [
        Chunk([token], len(prompt), table, True, True, slot=slot)
        for token, prompt, table, slot in zip(found[0], prompts, tables, slots, strict=True)
    ]
    batch = engine.build(decodes)
    for _ in range(3):
        found.append(engine.step(batch, [ROW] * 3)[0])
        batch.advance(found[-1])
    columns = [list(column) for column in zip(*found, strict=True)]
    assert columns == [expected_tokens(RECIPE, prompt, 4) for prompt in prompts]


def test_a_model_without_states_knows_no_slots() -> None:
    plain = Recipe("model", layout_of(SIZE), 1 << 20)
    engine = engine_of(plain)
    chunks = [Chunk(PROMPT[:4], 0, (at,), True) for at in range(5)]
    assert step(engine, *chunks) == expected_tokens(plain, PROMPT[:4], 1) * 5


# Restoring. A prefix is computed with a snapshot, then what follows goes on from that in another slot.


def prefixed(engine: EmulatedEngine, prompt: Sequence[int] = PROMPT, at: int = SNAPSHOT_AT) -> None:
    """KV up to SNAPSHOT_AT lies in BLOCKS; the snapshot of `at` in STATE; slot 0 goes on."""
    chunk = replace(chunk_of(prompt, 0, SNAPSHOT_AT), snapshots=((at, STATE),))
    step(engine, chunk)


def resumed(engine: EmulatedEngine, restore: tuple[int, ...], slot: int = 1, count: int = 6) -> list[int]:
    first = step(engine, replace(chunk_of(PROMPT, SNAPSHOT_AT, len(PROMPT), slot), restore=restore))
    return decoded(engine, PROMPT, first[0], count, slot)


def none_right(found: Sequence[int]) -> bool:
    expected = expected_tokens(RECIPE, PROMPT, len(found))
    return all(got != right for got, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("slot", [0, 1])
def test_a_snapshot_is_the_state_at_its_position(slot: int) -> None:
    """Also in a slot that holds another state."""
    engine = engine_of()
    prefixed(engine)
    step(engine, chunk_of(PROMPT, SNAPSHOT_AT, len(PROMPT)))
    assert resumed(engine, STATE, slot) == expected_tokens(RECIPE, PROMPT, 6)


def foreign(engine: EmulatedEngine, prompt: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """A snapshot at the same position that another request took, in blocks of its own."""
    chunk = replace(chunk_of(prompt, 0, SNAPSHOT_AT), blocks=(10, 6, 1), salt=salt)
    step(engine, replace(chunk, snapshots=((SNAPSHOT_AT, OTHER),)))
    return OTHER


def later(engine: EmulatedEngine) -> tuple[int, ...]:
    step(engine, replace(chunk_of(PROMPT, SNAPSHOT_AT, 13), snapshots=((13, OTHER),)))
    return OTHER


def none_where_another_is_live(engine: EmulatedEngine) -> tuple[int, ...]:
    step(engine, Chunk([5, 6, 7], 0, (19,), True, slot=1))
    return ()


WRONG: dict[str, Callable[[EmulatedEngine], tuple[int, ...]]] = {
    "none": lambda engine: (),
    "none where another is live": none_where_another_is_live,
    "of a prompt that differs in its first token": lambda engine: foreign(engine, [0, *PROMPT[1:]]),
    "of another tenant": lambda engine: foreign(engine, PROMPT, "theirs"),
    "after its position": later,
    "blocks in another order": lambda engine: (STATE[1], STATE[0], STATE[2]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_restore_shows(wrong: str) -> None:
    engine = engine_of()
    prefixed(engine)
    assert none_right(resumed(engine, WRONG[wrong](engine)))


@pytest.mark.parametrize("at", [1, 4, 8, 11])
def test_a_snapshot_of_another_position_shows(at: int) -> None:
    engine = engine_of()
    prefixed(engine, at=at)
    assert none_right(resumed(engine, STATE))


@given(st.integers(0, 8 * RECIPE.layout.state_bytes - 1))
def test_any_flipped_bit_of_a_snapshot_shows(bit: int) -> None:
    engine = engine_of()
    prefixed(engine)
    size = RECIPE.layout.slice_bytes
    part, byte = divmod(bit // 8, size)
    index, layer = divmod(part, 2)
    block = STATE[index] * SIZE
    engine.memory.export(layer, block, block + SIZE)[byte] ^= 1 << bit % 8
    assert none_right(resumed(engine, STATE))


def test_the_end_of_the_last_block_is_zeros_and_does_not_matter() -> None:
    engine = engine_of()
    engine.memory.export(1, STATE[2] * SIZE, STATE[2] * SIZE + SIZE)[:] = b"?" * RECIPE.layout.slice_bytes
    prefixed(engine)
    data = bytes(engine.memory.export(1, STATE[2] * SIZE, STATE[2] * SIZE + SIZE))
    used = RECIPE.layout.state_bytes - 5 * RECIPE.layout.slice_bytes
    assert any(data[:used])
    assert not any(data[used:])


def test_the_wrong_slot_shows() -> None:
    engine = engine_of()
    first = step(engine, replace(chunk_of(PROMPT, 0, len(PROMPT)), slot=2))
    step(engine, Chunk([1, 2, 3], 0, (19,), True, slot=3))
    found = decoded(engine, PROMPT, first[0], 2, slot=3)
    assert found[1] != expected_tokens(RECIPE, PROMPT, 2)[1]


def test_a_state_that_was_left_behind_shows() -> None:
    """A chunk ran, and the request goes on from the state before it."""
    engine = engine_of()
    prefixed(engine)
    first = step(engine, replace(chunk_of(PROMPT, SNAPSHOT_AT, len(PROMPT)), slot=0))
    behind = Chunk(first, len(PROMPT), BLOCKS, True, True, slot=1, restore=STATE)
    assert step(engine, behind)[0] != expected_tokens(RECIPE, PROMPT, 2)[1]


def test_kv_from_a_wrong_state_is_wrong_itself() -> None:
    """So that it shows to whom it is served from a cache, too."""
    right, wrong = engine_of(), engine_of()
    for engine, restore in ((right, STATE), (wrong, ())):
        prefixed(engine)
        resumed(engine, restore, count=1)
    slots = BLOCKS[3] * SIZE, BLOCKS[3] * SIZE + SIZE
    for layer in range(2):
        assert right.memory.export(layer, *slots) != wrong.memory.export(layer, *slots)


# Between engines and between steps.


def test_a_state_moves_to_another_engine_in_its_blocks() -> None:
    """A hand-over: the prompt's KV and then its state, in whole blocks, to other places."""
    source, target, layout = engine_of(), engine_of(), RECIPE.layout
    whole = replace(chunk_of(PROMPT, 0, len(PROMPT)), snapshots=((len(PROMPT), STATE),))
    first = step(source, whole)
    arena = memoryview(bytearray(8 * layout.block_bytes))
    sent, taken = (*BLOCKS[:5], *STATE), (0, 1, 2, 3, 4, 8, 9, 10)
    for layer in range(2):
        offsets = [at * layout.block_bytes + layer * layout.slice_bytes for at in range(8)]
        source.memory.save(layer, sent, arena, offsets)
        target.memory.fill(layer, taken, arena, offsets)
    blocks = (*taken[:5], 5)
    found = step(target, Chunk(first, len(PROMPT), blocks, True, True, slot=3, restore=taken[5:]))
    assert [*first, *found] == expected_tokens(RECIPE, PROMPT, 2)


def test_a_decode_that_restores_does_so_once() -> None:
    """Its batch advances in place."""
    engine = engine_of()
    first = step(engine, replace(chunk_of(PROMPT, 0, len(PROMPT)), snapshots=((len(PROMPT), STATE),)))
    batch = engine.build([Chunk(first, len(PROMPT), BLOCKS, True, True, slot=3, restore=STATE)])
    found = list(first)
    for _ in range(4):
        found += engine.step(batch, [ROW])[0]
        batch.advance(found[-1:])
    assert found == expected_tokens(RECIPE, PROMPT, 5)


class GoneError(Exception):
    """A prefix that was to be loaded is not there."""


def test_a_step_that_was_broken_off_leaves_states_and_snapshots_alone() -> None:
    engine = engine_of()
    prefixed(engine)
    rest = replace(chunk_of(PROMPT, SNAPSHOT_AT, len(PROMPT)), snapshots=((len(PROMPT), OTHER),))
    batch = engine.build([rest])

    def before(layer: int) -> None:
        if layer == 1:
            raise GoneError

    with pytest.raises(GoneError):
        engine.step(batch, [ROW], before_layer=before)
    assert not any(engine.memory.export(0, OTHER[0] * SIZE, OTHER[0] * SIZE + SIZE))
    assert engine.step(batch, [ROW])[0] == expected_tokens(RECIPE, PROMPT, 1)


@pytest.mark.parametrize("restores", [True, False])
def test_all_layers_are_waited_for_before_a_state_is_restored(restores: bool) -> None:
    engine, calls = engine_of(), list[tuple[str, int]]()
    prefixed(engine)
    rest = replace(chunk_of(PROMPT, SNAPSHOT_AT, len(PROMPT)), restore=STATE if restores else ())
    engine.step(
        engine.build([rest]),
        [ROW],
        lambda layer: calls.append(("on", layer)),
        lambda layer: calls.append(("before", layer)),
    )
    in_turn = [("before", 0), ("on", 0), ("before", 1), ("on", 1)]
    assert calls == (sorted(in_turn, key=lambda call: call[0]) if restores else in_turn)


def test_stages_of_a_pipeline_each_have_their_part_of_a_state() -> None:
    recipe = Recipe("model", layout_of(SIZE, layers=5, state_tokens=STATE_TOKENS), 1 << 20)
    stages = [engine_of(recipe, layers=layers) for layers in split_layers(5, 2)]

    def through(chunk: Chunk) -> list[int]:
        hidden = stages[0].relay(stages[0].build([chunk]))
        batch = stages[1].build([chunk])
        return stages[1].step(batch, [ROW] * len(batch.order), hidden=hidden)[0]

    assert [stage.memory.layout.state_blocks for stage in stages] == [recipe.layout.state_blocks] * 2
    through(replace(chunk_of(PROMPT, 0, SNAPSHOT_AT), snapshots=((SNAPSHOT_AT, STATE),)))
    found = through(replace(chunk_of(PROMPT, SNAPSHOT_AT, len(PROMPT)), slot=2, restore=STATE))
    for at in range(len(PROMPT), len(PROMPT) + 3):
        found += through(Chunk(found[-1:], at, BLOCKS, True, True, slot=2))
    assert found == expected_tokens(recipe, PROMPT, 4)


def test_memory_must_hold_all_snapshots_of_a_request_beside_two_blocks() -> None:
    with pytest.raises(StartError, match="fewer than 14 blocks"):
        EmulatedEngine(RECIPE, COST, 4, max_length=1000)
