"""The emulated engine: every byte of KV and state that it reads shows in its tokens; its time is the cost model's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.cost import Curve, compile_cost, facts_of
from isthmus.core.errors import ModelError, ProtocolError, StartError
from isthmus.core.types import Sampling, TokenLogprobs
from isthmus.live.engine.emulated import EmulatedEngine, PacedEngine, Recipe, expected_tokens, layout_of
from isthmus.live.engine.interface import Chunk, Hidden, Row, split_layers
from isthmus.live.engine.recipe import recipe_of, state_tokens_of, vocab_of

from .conftest import FolderOf

SIZE, NUM_LAYERS, NUM_BLOCKS = 4, 5, 20
PLAIN = Recipe("model", layout_of(SIZE, layers=NUM_LAYERS), 1 << 20)
HYBRID = Recipe("model", layout_of(SIZE, layers=NUM_LAYERS, state_tokens=11), 1 << 20)
CURVE = Curve(
    kv_token_bytes=1024,
    num_layers=8,
    prefill_token_s=1e-5,
    prefill_pair_s=1e-9,
    decode_fixed_s=3e-3,
    decode_sequence_s=1e-5,
    decode_context_s=1.234567e-8,
)
COST = compile_cost(CURVE)
ROW = Row(Sampling(temperature=0.0), ())
PROMPT = [random.Random(1).randrange(1000) for _ in range(19)]
BLOCKS = (7, 2, 3, 9, 5, 11, 0, 4)
STATE, OTHER = (14, 12, 15), (16, 17, 18)
"""The blocks of two snapshots: 11 tokens' worth in three blocks of four."""
SNAPSHOT_AT = 12


class Model:
    """An emulated model in pipeline stages, each of which has its blocks in other places than the one before."""

    def __init__(self, recipe: Recipe = PLAIN, stages: int = 1) -> None:
        self.recipe = recipe
        self.engines = [
            EmulatedEngine(recipe, COST, NUM_BLOCKS, max_length=1000, max_sequences=4, layers=layers)
            for layers in split_layers(NUM_LAYERS, stages)
        ]
        self.engine = self.engines[0]
        self.memory = self.engine.memory

    def step(self, *chunks: Chunk) -> list[int]:
        hidden = None
        for number, engine in enumerate(self.engines):
            batch = engine.build([mirrored(chunk) for chunk in chunks] if number % 2 else chunks)
            if number + 1 < len(self.engines):
                hidden = engine.relay(batch, hidden=hidden)
        return engine.step(batch, [ROW] * len(batch.order), hidden=hidden)[0]

    def decode(self, prompt: Sequence[int], found: list[int], count: int, **fields: object) -> list[int]:
        """Goes on behind a computed prompt and `found` until there are `count` tokens."""
        while len(found) < count:
            at = len(prompt) + len(found) - 1
            found = found + self.step(Chunk(found[-1:], at, BLOCKS, True, True, **fields))  # type: ignore[arg-type]
        return found

    def flip(self, layer: int, slot: int, bit: int) -> None:
        self.memory.export(layer, slot, slot + 1)[bit // 8] ^= 1 << bit % 8


def mirrored(chunk: Chunk) -> Chunk:
    def other(blocks: Sequence[int]) -> tuple[int, ...]:
        return tuple([NUM_BLOCKS - 1 - block for block in blocks])

    snapshots = tuple([(at, other(blocks)) for at, blocks in chunk.snapshots])
    return replace(chunk, blocks=other(chunk.blocks), snapshots=snapshots, restore=other(chunk.restore))


def part(start: int, stop: int, prompt: Sequence[int] = PROMPT, **fields: object) -> Chunk:
    return replace(Chunk(prompt[start:stop], start, BLOCKS, stop == len(prompt)), **fields)  # type: ignore[arg-type]


# ---- tokens


@settings(max_examples=100)
@given(
    st.sampled_from([PLAIN, HYBRID]),
    st.integers(1, NUM_LAYERS),
    st.lists(st.integers(0, 300), min_size=1, max_size=40),
    st.permutations(range(12)),
    st.lists(st.integers(1, 39), max_size=4),
    st.lists(st.integers(1, 39), max_size=2, unique=True),
    st.integers(0, 3),
    st.sampled_from(["", "tenant"]),
)
def test_stages_blocks_chunks_snapshots_and_slots_do_not_matter(
    recipe: Recipe, stages: int, prompt: list[int], blocks: list[int], cuts: list[int], wanted: list[int], slot: int,
    salt: str,
) -> None:  # fmt: skip
    model, tokens = Model(recipe, stages), list[int]()
    model.step(part(0, 19, slot=slot))  # what another request leaves in the slot
    edges = sorted({0, len(prompt), *(cut for cut in cuts if cut < len(prompt))})
    tables = dict(zip(sorted(wanted), (STATE, OTHER), strict=False)) if recipe is HYBRID else {}
    for start, stop in pairwise(edges):
        snapshots = tuple([(at, table) for at, table in tables.items() if start < at <= stop])
        more = {"blocks": blocks, "slot": slot, "salt": salt, "snapshots": snapshots}
        tokens = model.step(part(start, stop, prompt, **more))
    while len(tokens) < 4:
        at = len(prompt) + len(tokens) - 1
        tokens += model.step(Chunk(tokens[-1:], at, blocks, True, True, salt, slot=slot))
    assert tokens == expected_tokens(recipe, prompt, 4, salt=salt)
    for at, table in tables.items():
        if at < len(prompt):
            more = {"blocks": blocks, "slot": (slot + 1) % 4, "salt": salt, "restore": table}
            assert model.step(part(at, len(prompt), prompt, **more)) == tokens[:1]


@pytest.mark.parametrize(("recipe", "slots"), [(PLAIN, (0, 0, 0)), (HYBRID, (2, 0, 3))])
def test_requests_of_a_batch_do_not_mix(recipe: Recipe, slots: tuple[int, ...]) -> None:
    engine, prompts = Model(recipe).engine, [PROMPT[:6], PROMPT[:3], [*PROMPT[:5], 0]]
    tables = [(0, 1, 2), (3, 4), (5, 6, 7)]
    places = list(zip(prompts, tables, slots, strict=True))
    chunks = [Chunk(prompt, 0, table, True, slot=slot) for prompt, table, slot in places]
    found = [engine.step(engine.build(chunks), [ROW] * 3)[0]]
    batch = engine.build(
        [
            Chunk([token], len(prompt), table, True, True, slot=slot)
            for token, (prompt, table, slot) in zip(found[0], places, strict=True)
        ]
    )
    for _ in range(3):
        found.append(engine.step(batch, [ROW] * 3)[0])
        batch.advance(found[-1])
    columns = [list(column) for column in zip(*found, strict=True)]
    assert columns == [expected_tokens(recipe, prompt, 4) for prompt in prompts]


def test_model_and_layout_change_every_token_and_a_stop_token_ends_an_answer() -> None:
    ours = expected_tokens(PLAIN, PROMPT, 20)
    layouts = [layout_of(2 * SIZE, layers=NUM_LAYERS), layout_of(SIZE), HYBRID.layout]
    for other in (
        Recipe("other", PLAIN.layout, 1 << 20),
        *[Recipe("model", each, 1 << 20) for each in layouts],
    ):
        assert not set(ours) & set(expected_tokens(other, PROMPT, 20))
    assert expected_tokens(PLAIN, PROMPT, 20, stop_tokens=(ours[4],)) == ours[:5]


def test_sampling_parameters_change_nothing_and_the_token_is_certain() -> None:
    engine = Model().engine
    batch, [token] = engine.build([part(0, 19)]), Model().step(part(0, 19))
    hot = Sampling(temperature=2.0, seed=9, presence_penalty=2.0, logit_bias=((1, 100.0),))
    assert engine.step(batch, [Row(hot, ())]) == ([token], [None])
    for wanted, expected in ((0, ()), (3, ((token, 0.0),))):
        assert engine.step(batch, [Row(Sampling(logprobs=wanted), ())])[1] == [TokenLogprobs(0.0, expected)]
    assert engine.step(engine.build([part(0, 3)]), []) == ([], [])


# ---- wrong bytes: each test damages what one request reads and demands other tokens


def none_right(found: Sequence[int], recipe: Recipe = HYBRID, salt: str = "") -> bool:
    expected = expected_tokens(recipe, PROMPT, len(found), salt=salt)
    return all(got != right for got, right in zip(found, expected, strict=True))


@given(st.integers(0, len(PROMPT) - 1), st.integers(0, NUM_LAYERS - 1), st.integers(0, 8 * 16 - 1))
def test_any_flipped_bit_changes_the_next_token_and_all_after_it(position: int, layer: int, bit: int) -> None:
    model = Model()
    first = model.step(part(0, 19))
    model.flip(layer, BLOCKS[position // SIZE] * SIZE + position % SIZE, bit)
    expected = expected_tokens(PLAIN, PROMPT, 5)
    found = model.decode(PROMPT, first, 5)
    assert first == expected[:1]
    assert all(got != right for got, right in zip(found[1:], expected[1:], strict=True))


def test_blocks_of_a_foreign_tenant_and_swapped_ones_show() -> None:
    model = Model()
    first = model.step(part(0, 19))
    swapped = (BLOCKS[1], BLOCKS[0], *BLOCKS[2:])
    assert model.step(Chunk(first, 19, swapped, True, True)) != expected_tokens(PLAIN, PROMPT, 2)[1:]
    theirs = model.step(part(8, 19, salt="ours"))
    assert none_right(model.decode(PROMPT, theirs, 5, salt="ours"), PLAIN, "ours")


def resumed(model: Model, restore: tuple[int, ...], count: int = 6, slot: int = 1) -> list[int]:
    first = model.step(part(SNAPSHOT_AT, 19, slot=slot, restore=restore))
    return model.decode(PROMPT, first, count, slot=slot)


def prefixed() -> Model:
    """KV up to SNAPSHOT_AT lies in BLOCKS, the snapshot in STATE."""
    model = Model(HYBRID)
    model.step(part(0, SNAPSHOT_AT, snapshots=((SNAPSHOT_AT, STATE),)))
    return model


@pytest.mark.parametrize("slot", [0, 1])
def test_a_snapshot_is_the_state_at_its_position_in_a_slot_that_holds_another_too(slot: int) -> None:
    model = prefixed()
    model.step(part(SNAPSHOT_AT, 19))
    assert resumed(model, STATE, slot=slot) == expected_tokens(HYBRID, PROMPT, 6)


def foreign(model: Model, prompt: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """A snapshot at the same position that another request took, in blocks of its own."""
    taken = ((SNAPSHOT_AT, OTHER),)
    model.step(part(0, SNAPSHOT_AT, prompt, blocks=(10, 6, 1), salt=salt, snapshots=taken))
    return OTHER


def of_position(model: Model, at: int) -> tuple[int, ...]:
    """The snapshot of another position of the same prompt."""
    start = SNAPSHOT_AT if at > SNAPSHOT_AT else 0
    model.step(part(start, max(at, SNAPSHOT_AT), slot=0, snapshots=((at, OTHER),)))
    return OTHER


def none_where_another_is_live(model: Model) -> tuple[int, ...]:
    model.step(Chunk([5, 6, 7], 0, (19,), True, slot=1))
    return ()


WRONG: dict[str, Callable[[Model], tuple[int, ...]]] = {
    "none": lambda model: (),
    "none where another is live": none_where_another_is_live,
    "of a prompt that differs in its first token": lambda model: foreign(model, [0, *PROMPT[1:]]),
    "of another tenant": lambda model: foreign(model, PROMPT, "theirs"),
    **{f"of position {at}": partial(of_position, at=at) for at in (1, 4, 8, 11, 13)},
    "blocks in another order": lambda model: (STATE[1], STATE[0], STATE[2]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_restore_shows(wrong: str) -> None:
    model = prefixed()
    assert none_right(resumed(model, WRONG[wrong](model)))


@given(st.integers(0, 8 * HYBRID.layout.state_bytes - 1))
def test_any_flipped_bit_of_a_snapshot_shows(bit: int) -> None:
    model = prefixed()
    block, within = divmod(bit // 8, HYBRID.layout.block_bytes)
    layer, byte = divmod(within, HYBRID.layout.slice_bytes)
    model.flip(layer, STATE[block] * SIZE + byte // 16, byte % 16 * 8 + bit % 8)
    assert none_right(resumed(model, STATE))


def test_the_wrong_slot_and_a_state_that_was_left_behind_show() -> None:
    model = prefixed()
    first = model.step(part(SNAPSHOT_AT, 19, slot=2, restore=STATE))
    model.step(Chunk([1, 2, 3], 0, (19,), True, slot=3))
    for fields in ({"slot": 3}, {"slot": 1, "restore": STATE}):
        assert model.decode(PROMPT, first, 2, **fields) != expected_tokens(HYBRID, PROMPT, 2)


def test_kv_from_a_wrong_state_is_wrong_itself() -> None:
    """To be seen by whoever is served from a cache, too."""
    right, wrong = prefixed(), prefixed()
    for model, restore in ((right, STATE), (wrong, ())):
        resumed(model, restore, 1)
    slots = BLOCKS[3] * SIZE, BLOCKS[3] * SIZE + SIZE
    for layer in range(NUM_LAYERS):
        assert right.memory.export(layer, *slots) != wrong.memory.export(layer, *slots)


@given(st.data())
def test_any_bit_flipped_between_stages_changes_the_token(data: st.DataObject) -> None:
    first, last = Model(stages=2).engines
    hidden = first.relay(first.build([part(0, 19)]))
    damaged = bytearray(hidden.data)
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    wrong = Hidden(hidden.shape, hidden.dtype, memoryview(damaged))
    assert last.step(last.build([part(0, 19)]), [ROW], hidden=wrong)[0] != expected_tokens(PLAIN, PROMPT, 1)
    for dtype, wrong_data in (("uint8", damaged[:-1]), ("uint8", damaged + b"?"), ("float32", damaged)):
        wrong = Hidden((len(wrong_data),), dtype, memoryview(wrong_data))
        with pytest.raises(ProtocolError, match=f"{len(wrong_data)} bytes"):
            last.step(last.build([part(0, 19)]), [ROW], hidden=wrong)


# ---- scores


def scores_of(engine: EmulatedEngine, size: int, start: int = 0, **fields: object) -> list[TokenLogprobs]:
    """Of PROMPT, in chunks of this size."""
    found = list[TokenLogprobs]()
    for at in range(start, len(PROMPT), size):
        targets = PROMPT[at + 1 : at + size + 1]
        chunk = part(at, min(at + size, 19), samples=False, targets=targets, **({"num_top": 3} | fields))
        engine.step(engine.build([chunk]), [], on_scores=lambda index, position, told: found.extend(told))
    return found


def test_scores_of_a_prompt_tell_every_token_and_all_before_it() -> None:
    """They do not depend on how it is cut; each is another one, and a damaged byte shows in all behind it."""
    engine = Model().engine
    expected = scores_of(engine, 100)
    values = [each.chosen for each in expected]
    assert len(set(values)) == len(PROMPT) - 1 and all(-1 < value <= 0 for value in values)
    assert [each.rank for each in expected] == [1] * len(values)
    assert [each.top for each in expected] == [
        ((token, value),) for token, value in zip(PROMPT[1:], values, strict=True)
    ]
    for size in (1, 3, 18, 19):
        assert scores_of(engine, size) == expected
    assert [each.top for each in scores_of(engine, 5, num_top=0)] == [()] * len(values)
    assert {each.chosen for each in scores_of(Model().engine, 100, salt="tenant")}.isdisjoint(values)
    engine.memory.export(1, BLOCKS[1] * SIZE + 3, BLOCKS[1] * SIZE + 4)[0] ^= 1  # position 7
    assert {each.chosen for each in scores_of(engine, 100, 8)}.isdisjoint(values)


# ---- steps that wait for loads


@pytest.mark.parametrize("broken", [0, 1, 4])
def test_kv_of_a_layer_is_touched_when_it_was_waited_for_and_a_step_broken_off_can_be_repeated(
    broken: int,
) -> None:
    engine, announced = Model().engine, list[int]()
    batch = engine.build([part(0, 19)])

    def before(layer: int) -> None:
        written = [any(engine.memory.export(each, 0, NUM_BLOCKS * SIZE)) for each in range(NUM_LAYERS)]
        assert written == [each < layer for each in range(NUM_LAYERS)] and announced == list(range(layer))
        if layer == broken:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        engine.step(batch, [ROW], announced.append, before)
    assert engine.step(batch, [ROW])[0] == expected_tokens(PLAIN, PROMPT, 1)


@pytest.mark.parametrize("restores", [True, False])
def test_all_layers_are_waited_for_before_a_state_is_restored(restores: bool) -> None:
    """A step that is broken off leaves states and snapshots alone."""
    engine, calls = prefixed().engine, list[tuple[str, int]]()
    fields = {"restore": STATE} if restores else {}
    batch = engine.build([part(SNAPSHOT_AT, 19, snapshots=((19, OTHER),), **fields)])

    def gone(layer: int) -> None:
        if layer == 1:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        engine.step(batch, [ROW], before_layer=gone)
    assert not any(engine.memory.export(0, OTHER[0] * SIZE, OTHER[0] * SIZE + SIZE))
    tokens, _ = engine.step(
        batch, [ROW], lambda layer: calls.append(("on", layer)), lambda layer: calls.append(("before", layer))
    )
    assert tokens == expected_tokens(HYBRID, PROMPT, 1)
    in_turn = [(name, layer) for layer in range(NUM_LAYERS) for name in ("before", "on")]
    assert calls == (sorted(in_turn, key=lambda call: call[0]) if restores else in_turn)


def test_a_state_moves_to_another_engine_in_its_blocks_and_a_decode_restores_it_once() -> None:
    """A hand-over: the prompt's KV and then its state, in whole blocks, to other places; the last ends with zeros."""
    source, target, layout = Model(HYBRID), Model(HYBRID), HYBRID.layout
    source.memory.export(1, STATE[2] * SIZE, STATE[2] * SIZE + SIZE)[:] = b"?" * layout.slice_bytes
    first = source.step(part(0, 19, snapshots=((19, STATE),)))
    arena = memoryview(bytearray(8 * layout.block_bytes))
    taken = (0, 1, 2, 3, 4, 8, 9, 10)
    for layer in range(NUM_LAYERS):
        offsets = [at * layout.block_bytes + layer * layout.slice_bytes for at in range(8)]
        source.memory.save(layer, (*BLOCKS[:5], *STATE), arena, offsets)
        target.memory.fill(layer, taken, arena, offsets)
    used = layout.state_bytes - 2 * layout.block_bytes
    assert any(arena[-layout.block_bytes :][:used]) and not any(arena[-layout.block_bytes :][used:])
    decode = Chunk(first, 19, (*taken[:5], 5), True, True, slot=3, restore=taken[5:])
    batch, found = target.engine.build([decode]), list(first)
    for _ in range(4):
        found += target.engine.step(batch, [ROW])[0]
        batch.advance(found[-1:])
    assert found == expected_tokens(HYBRID, PROMPT, 5)


# ---- time


def test_a_step_takes_what_the_cost_model_says() -> None:
    engine = Model().engine
    prompts = engine.build([Chunk(PROMPT[:8], 0, (0, 1), False), Chunk(PROMPT[8:], 8, BLOCKS, True)])
    assert engine.step_ps(prompts) == COST.step_ps([(8, 0), (11, 8)], 0, 0)
    mixed = [Chunk([1], 6, (0, 1), True, True), Chunk([1], 9, (2, 3, 4), True, True), Chunk([5], 3, (5,), True)]
    assert engine.step_ps(engine.build(mixed)) == COST.step_ps([(1, 3)], 2, 17)
    decodes = engine.build(mixed[:2])
    assert engine.step_ps(decodes) == COST.step_ps((), 2, 17)
    decodes.advance([3, 4])
    assert engine.step_ps(decodes) == COST.step_ps((), 2, 19)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_time_of_a_step_is_shared_out_to_the_picosecond(num_stages: int) -> None:
    chunks = [Chunk(PROMPT[:7], 0, range(5), True), Chunk([1], 9, range(3), True, decodes=True)]
    stages = Model(stages=num_stages).engines
    shares = [engine.step_ps(engine.build(chunks)) for engine in stages]
    assert sum(shares) == COST.step_ps([(7, 0)], 1, 10)
    sizes = [stop - first for first, stop in (engine.layers for engine in stages)]
    for (left, one), (right, other) in pairwise(zip(shares, sizes, strict=True)):
        assert abs(left * other - right * one) <= NUM_LAYERS


class Clock:
    """Time that only sleeping and waiting move, and sleeping always too far. `naps`: until when was slept."""

    LATE_NS = 12_345

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.naps = 1_000_000_007, list[int]()
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.naps.append(self.now_ns + round(seconds * 1e9))
        self.now_ns = self.naps[-1] + self.LATE_NS

    def waits(self, *ns: int) -> Callable[[int], None]:
        """A `before_layer` that takes so long for each layer."""

        def before(layer: int) -> None:
            self.now_ns += ns[layer]

        return before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def paced(state_tokens: int = 0) -> PacedEngine:
    """In two layers."""
    recipe = Recipe("model", layout_of(SIZE, state_tokens=state_tokens), 1 << 20)
    return PacedEngine(recipe, COST, 12, max_length=100)


def test_the_paced_engine_sleeps_to_the_exact_sum(clock: Clock) -> None:
    """However late it wakes, the next iteration's end lies where the sum of the steps puts it."""
    engine, naps = paced(), clock.naps
    batch, elapsed = engine.build([Chunk([1], 4, BLOCKS, True, True)]), 0
    for context in (5, 6, 7):
        before = elapsed
        elapsed += COST.step_ps((), 1, context)
        batch_tokens, _ = engine.step(batch, [ROW])
        half = (before + (elapsed - before) // 2) // 1000
        assert naps[-2:] == [1_000_000_007 + half, 1_000_000_007 + elapsed // 1000]
        batch.advance(batch_tokens)
    assert len(naps) == 6


def test_a_layer_of_the_paced_engine_starts_when_it_was_waited_for(clock: Clock) -> None:
    """The wait for layer 0 is over before its time comes, that for layer 1 is not."""
    engine, start_ns = paced(), clock.now_ns
    batch = engine.build([Chunk([1], 4, BLOCKS, True, True)])
    step_ns = engine.step_ps(batch) // 1000
    engine.step(batch, [ROW], before_layer=clock.waits(0, 2 * step_ns))
    assert clock.naps == [start_ns + step_ns // 2, start_ns + 3 * step_ns]
    batch.advance([0])
    again_ns = clock.naps[-1] + engine.step_ps(batch) // 1000
    engine.step(batch, [ROW], before_layer=clock.waits(0, 0))
    assert abs(clock.naps[-1] - again_ns) <= 1, "a wait puts off, lateness does not"


def test_a_state_to_restore_holds_up_all_layers_of_the_paced_engine(clock: Clock) -> None:
    engine, start_ns = paced(3), clock.now_ns
    batch = engine.build([Chunk([1], 4, BLOCKS, True, True, restore=(8,))])
    step_ns = engine.step_ps(batch) // 1000
    engine.step(batch, [ROW], before_layer=clock.waits(0, step_ns // 4))
    whole_ns = start_ns + step_ns // 4 + step_ns
    ends = (whole_ns - step_ns // 2, whole_ns)
    assert all(abs(nap - end) <= 1 for nap, end in zip(clock.naps, ends, strict=True))


def test_a_step_of_the_paced_engine_that_was_broken_off_takes_its_time_anew(clock: Clock) -> None:
    engine = paced()
    batch = engine.build([Chunk(PROMPT, 0, BLOCKS, True)])

    def before(layer: int) -> None:
        if layer == 1:
            clock.now_ns += 10**9
            raise ConnectionError

    with pytest.raises(ConnectionError):
        engine.step(batch, [ROW], before_layer=before)
    again_ns = clock.now_ns
    engine.step(batch, [ROW])
    assert clock.naps[-1] == again_ns + engine.step_ps(batch) // 1000


# ---- what it needs


@pytest.mark.parametrize(("recipe", "num_blocks", "least"), [(PLAIN, 1, 2), (HYBRID, 4, 14)])
def test_memory_must_hold_two_blocks_and_all_snapshots_of_a_request(
    recipe: Recipe, num_blocks: int, least: int
) -> None:
    with pytest.raises(StartError, match=f"fewer than {least} blocks"):
        EmulatedEngine(recipe, COST, num_blocks, max_length=1000)


def test_stages_name_blocks_like_the_whole_model_and_hold_only_their_layers() -> None:
    for engine, num_layers in zip(Model(HYBRID, 2).engines, (3, 2), strict=True):
        assert (engine.revision, engine.layout) == (HYBRID.revision, HYBRID.layout)
        assert engine.memory.layout.num_layers == len(engine.memory.layers) == num_layers
        assert engine.memory.layout.state_blocks == HYBRID.layout.state_blocks == len(STATE)


def test_the_emulated_path_loads_no_torch() -> None:
    modules = "isthmus.live.engine.emulated, isthmus.live.cluster.node, isthmus.live.cluster.stage, isthmus.cli.engines"
    code = f"import sys, {modules}; print(sorted({{'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# ---- the recipe of a model's files


def write_folder(folder: Path, vocab: object = None, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    tokenizer = {"model": {"vocab": {"a": 0, "b": 3} if vocab is None else vocab}, "added_tokens": [{"id": 9}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_the_vocabulary_counts_added_tokens_and_gaps(tmp_path: Path) -> None:
    assert vocab_of(write_folder(tmp_path)) == 10
    assert vocab_of(write_folder(tmp_path, [["x", -1.0]] * 20)) == 20
    with pytest.raises(ModelError, match="vocabulary"):
        vocab_of(write_folder(tmp_path, {"a": "b"}))


def test_model_and_vocabulary_are_in_the_revision(tmp_path: Path) -> None:
    one, two = write_folder(tmp_path / "one"), write_folder(tmp_path / "two", hidden_size=8)
    three = write_folder(tmp_path / "three", {"a": 100})
    revisions = {recipe_of(folder, folder, SIZE).revision for folder in (one, two, three)}
    assert len(revisions) == 3
    assert recipe_of(one, one, SIZE).revision == recipe_of(one, one, 2 * SIZE).revision


def test_a_hybrid_model_keeps_states_of_as_many_blocks_as_the_real_one_and_others_none(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    folder = folder_of("qwen3_next")
    facts = facts_of(json.loads((folder / "config.json").read_text()))
    tokens = -(-facts.state_bytes // (2 * facts.kv_elements))  # of KV in 16 bits
    assert tokens > 2 * 16
    for size in (16, 64):
        layout = recipe_of(folder, folder, size).layout
        assert layout.state_blocks == -(-tokens // size)
        assert layout.state_bytes == layout.num_layers * 16 * tokens
    assert recipe_of(write_folder(tmp_path / "plain"), tmp_path / "plain", SIZE).layout == layout_of(SIZE)
    assert state_tokens_of({"architectures": ["UnheardOfForCausalLM"]}) == 0
