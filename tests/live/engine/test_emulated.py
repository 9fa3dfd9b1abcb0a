"""The emulated engine: every KV byte it reads shows in its tokens, and its time is the cost model's."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import StartError
from isthmus.core.types import Sampling, TokenLogprobs
from isthmus.live.engine.emulated import EmulatedEngine, PacedEngine, Recipe, expected_tokens, layout_of
from isthmus.live.engine.interface import Chunk, Row

SIZE = 4
RECIPE = Recipe("model", layout_of(SIZE), 1 << 20)
CURVE = Curve(
    kv_token_bytes=1024,
    num_layers=8,
    prefill_token_s=1e-5,
    prefill_pair_s=1e-9,
    decode_fixed_s=3e-3,
    decode_sequence_s=1e-5,
    decode_context_s=1.234567e-8,
)
GREEDY = Sampling(temperature=0.0)
PROMPT = [random.Random(1).randrange(1000) for _ in range(19)]
BLOCKS = (7, 2, 3, 9, 5, 11, 0, 4)


def engine_of(recipe: Recipe = RECIPE, num_blocks: int = 12) -> EmulatedEngine:
    return EmulatedEngine(recipe, compile_cost(CURVE), num_blocks, max_length=1000)


def step(engine: EmulatedEngine, chunk: Chunk) -> int | None:
    rows = [Row(GREEDY, ())] if chunk.samples else []
    tokens, _ = engine.step(engine.build([chunk]), rows)
    return tokens[0] if tokens else None


def answer(
    engine: EmulatedEngine,
    prompt: Sequence[int],
    count: int,
    *,
    blocks: Sequence[int] = BLOCKS,
    chunk: int = 1000,
    start: int = 0,
    salt: str = "",
) -> list[int]:
    """Prefill from `start` on in chunks, then decode."""
    tokens, found = list(prompt), list[int]()
    for at in range(start, len(prompt), chunk):
        piece = tokens[at : at + chunk]
        last = at + len(piece) == len(prompt)
        token = step(engine, Chunk(piece, at, blocks, last, False, salt))
    while True:
        assert token is not None
        found.append(token)
        tokens.append(token)
        if len(found) == count:
            return found
        token = step(engine, Chunk(tokens[-1:], len(tokens) - 1, blocks, True, True, salt))


# The tokens.


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=20),
    st.permutations(range(12)),
    st.integers(1, 25),
    st.sampled_from(["", "tenant"]),
)
def test_blocks_and_chunks_do_not_matter(prompt: list[int], blocks: list[int], chunk: int, salt: str) -> None:
    expected = expected_tokens(RECIPE, prompt, 6, salt=salt)
    assert answer(engine_of(), prompt, 6, blocks=blocks, chunk=chunk, salt=salt) == expected


def test_requests_of_a_batch_do_not_mix() -> None:
    engine, prompts = engine_of(num_blocks=16), [PROMPT, PROMPT[:5], [*PROMPT[:18], 0]]
    tables = [(0, 1, 2, 3, 4, 5), (6, 7, 8), (9, 10, 11, 12, 13, 14)]
    chunks = [Chunk(prompt, 0, table, True) for prompt, table in zip(prompts, tables, strict=True)]
    batch, rows = engine.build(chunks), [Row(GREEDY, ())] * 3
    found = [engine.step(batch, rows)[0]]
    for _ in range(3):
        batch.advance(found[-1])
        found.append(engine.step(batch, rows)[0])
    columns = [list(column) for column in zip(*found, strict=True)]
    assert columns == [expected_tokens(RECIPE, prompt, 4) for prompt in prompts]


def test_a_chunk_that_samples_nothing_gives_no_token() -> None:
    engine = engine_of()
    tokens, logprobs = engine.step(engine.build([Chunk(PROMPT[:3], 0, BLOCKS, False)]), [])
    assert (tokens, logprobs) == ([], [])


# Wrong bytes. Each test damages what one request reads and demands another answer.


def prefilled(engine: EmulatedEngine, prompt: Sequence[int] = PROMPT, salt: str = "") -> int:
    token = step(engine, Chunk(prompt, 0, BLOCKS, True, False, salt))
    assert token is not None
    return token


def resumed(engine: EmulatedEngine, first: int, count: int = 5) -> list[int]:
    """Goes on from a computed PROMPT by decoding."""
    return [first, *answer(engine, [*PROMPT, first], count - 1, start=len(PROMPT))]


@given(st.integers(0, len(PROMPT) - 1), st.integers(0, 1), st.integers(0, 8 * 16 - 1))
def test_any_flipped_bit_changes_the_next_token_and_all_after_it(position: int, layer: int, bit: int) -> None:
    engine = engine_of()
    first = prefilled(engine)
    slot = BLOCKS[position // SIZE] * SIZE + position % SIZE
    engine.memory.export(layer, slot, slot + 1)[bit // 8] ^= 1 << bit % 8
    found, expected = resumed(engine, first), expected_tokens(RECIPE, PROMPT, 5)
    assert found[0] == expected[0]
    assert all(got != right for got, right in zip(found[1:], expected[1:], strict=True))


def test_a_block_of_a_foreign_tenant_shows() -> None:
    """A prefix hit that ignored the salt: the first two blocks are another tenant's, of the same tokens."""
    engine = engine_of()
    prefilled(engine, salt="theirs")
    found = answer(engine, PROMPT, 5, start=2 * SIZE, salt="ours")
    expected = expected_tokens(RECIPE, PROMPT, 5, salt="ours")
    assert all(got != right for got, right in zip(found, expected, strict=True))


def test_swapped_blocks_show() -> None:
    engine = engine_of()
    first = prefilled(engine)
    swapped = (BLOCKS[1], BLOCKS[0], *BLOCKS[2:])
    assert answer(engine, [*PROMPT, first], 1, start=len(PROMPT), blocks=swapped) != [
        expected_tokens(RECIPE, PROMPT, 2)[1]
    ]


# What a client may ask.


def test_log_probabilities_say_that_the_token_is_certain() -> None:
    engine = engine_of()
    for wanted, expected in ((0, ()), (3, ((prefilled(engine), 0.0),))):
        batch = engine.build([Chunk(PROMPT, 0, BLOCKS, True)])
        _, logprobs = engine.step(batch, [Row(Sampling(logprobs=wanted), ())])
        assert logprobs == [TokenLogprobs(0.0, expected)]


def scores_of(engine: EmulatedEngine, size: int, salt: str = "", num_top: int = 3) -> list[TokenLogprobs]:
    """Of PROMPT, in chunks of this size."""
    found = list[TokenLogprobs]()
    for at in range(0, len(PROMPT), size):
        part, targets = PROMPT[at : at + size], PROMPT[at + 1 : at + size + 1]
        chunk = Chunk(part, at, BLOCKS, False, salt=salt, targets=targets, num_top=num_top)
        engine.step(engine.build([chunk]), [], on_scores=lambda index, position, told: found.extend(told))
    return found


def test_scores_of_a_prompt_tell_every_token_and_all_before_it() -> None:
    """They do not depend on how it is cut; each is another one."""
    expected = scores_of(engine_of(), 100)
    values = [each.chosen for each in expected]
    assert len(set(values)) == len(PROMPT) - 1 and all(-1 < value <= 0 for value in values)
    assert [each.rank for each in expected] == [1] * len(values)
    assert [each.top for each in expected] == [
        ((token, value),) for token, value in zip(PROMPT[1:], values, strict=True)
    ]
    for size in (1, 3, 18, 19):
        assert scores_of(engine_of(), size) == expected
    assert [each.top for each in scores_of(engine_of(), 5, num_top=0)] == [()] * len(values)
    others = {each.chosen for each in scores_of(engine_of(), 100, "tenant")}
    assert others.isdisjoint(values)


def test_a_damaged_byte_shows_in_all_scores_behind_it() -> None:
    engine, expected = engine_of(), scores_of(engine_of(), 8)
    prefilled(engine)
    engine.memory.export(1, BLOCKS[1] * SIZE + 3, BLOCKS[1] * SIZE + 4)[0] ^= 1  # position 7
    chunk = Chunk(PROMPT[8:], 8, BLOCKS, False, targets=PROMPT[9:])
    found = list[TokenLogprobs]()
    engine.step(engine.build([chunk]), [], on_scores=lambda index, position, told: found.extend(told))
    assert {each.chosen for each in found}.isdisjoint(each.chosen for each in expected[8:])


def test_sampling_parameters_change_nothing() -> None:
    engine = engine_of()
    batch = engine.build([Chunk(PROMPT, 0, BLOCKS, True)])
    hot = Sampling(temperature=2.0, seed=9, presence_penalty=2.0, logit_bias=((1, 100.0),))
    assert engine.step(batch, [Row(hot, ())]) == ([prefilled(engine)], [None])


class GoneError(Exception):
    """A prefix that was to be loaded is not there."""


def test_before_layer_is_called_before_the_kv_of_that_layer_is_touched() -> None:
    engine, calls = engine_of(), list[tuple[str, int]]()

    def before(layer: int) -> None:
        calls.append(("before", layer))
        written = [any(engine.memory.export(each, 0, 12 * SIZE)) for each in range(2)]
        assert written == [each < layer for each in range(2)]

    batch = engine.build([Chunk(PROMPT, 0, BLOCKS, True)])
    engine.step(batch, [Row(GREEDY, ())], lambda layer: calls.append(("on", layer)), before)
    assert calls == [("before", 0), ("on", 0), ("before", 1), ("on", 1)]


@pytest.mark.parametrize("broken", range(2))
def test_a_step_that_before_layer_broke_off_can_be_repeated(broken: int) -> None:
    engine, announced = engine_of(), list[int]()
    batch = engine.build([Chunk(PROMPT, 0, BLOCKS, True)])

    def before(layer: int) -> None:
        if layer == broken:
            raise GoneError

    with pytest.raises(GoneError):
        engine.step(batch, [Row(GREEDY, ())], announced.append, before)
    assert announced == list(range(broken))
    tokens, _ = engine.step(batch, [Row(GREEDY, ())])
    assert resumed(engine, tokens[0]) == expected_tokens(RECIPE, PROMPT, 5)


def test_a_prefix_may_come_layer_by_layer() -> None:
    """Saved as its layers are computed, filled as they are waited for."""
    source, target, layout = engine_of(), engine_of(), RECIPE.layout
    arena, slots = memoryview(bytearray(9 * layout.block_bytes)), (4, 0, 2)

    def offsets(layer: int) -> list[int]:
        return [slot * layout.block_bytes + layer * layout.slice_bytes for slot in slots]

    prefix = source.build([Chunk(PROMPT[: 3 * SIZE], 0, BLOCKS, False)])
    source.step(prefix, [], lambda layer: source.memory.save(layer, BLOCKS[:3], arena, offsets(layer)))
    blocks = (1, 6, 8, 10, 3, 2)
    rest = target.build([Chunk(PROMPT[3 * SIZE :], 3 * SIZE, blocks, True)])

    def before(layer: int) -> None:
        target.memory.fill(layer, blocks[:3], arena.toreadonly(), offsets(layer))

    tokens, _ = target.step(rest, [Row(GREEDY, ())], before_layer=before)
    assert tokens == expected_tokens(RECIPE, PROMPT, 1)


# Time.


def test_a_step_takes_what_the_cost_model_says() -> None:
    engine, cost = engine_of(num_blocks=40), compile_cost(CURVE)
    prompts = engine.build([Chunk(PROMPT[:8], 0, (0, 1), False), Chunk(PROMPT[8:], 8, BLOCKS, True)])
    assert engine.step_ps(prompts) == cost.step_ps([(8, 0), (11, 8)], 0, 0)
    mixed = [Chunk([1], 6, (0, 1), True, True), Chunk([1], 9, (2, 3, 4), True, True), Chunk([5], 3, (5,), True)]
    assert engine.step_ps(engine.build(mixed)) == cost.step_ps([(1, 3)], 2, 17)
    decodes = engine.build(mixed[:2])
    assert engine.step_ps(decodes) == cost.step_ps((), 2, 17)
    decodes.advance([3, 4])
    assert engine.step_ps(decodes) == cost.step_ps((), 2, 19)


class Clock:
    """Time that only sleeping moves, and always too far. `naps`: until when was slept."""

    LATE_NS = 12_345

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.naps = 1_000_000_007, list[int]()
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.naps.append(self.now_ns + round(seconds * 1e9))
        self.now_ns = self.naps[-1] + self.LATE_NS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def paced() -> PacedEngine:
    return PacedEngine(RECIPE, compile_cost(CURVE), 12, max_length=100)


def test_the_paced_engine_sleeps_to_the_exact_sum(clock: Clock) -> None:
    """However late it wakes, the next iteration's end lies where the sum of the steps puts it."""
    engine, cost, naps = paced(), compile_cost(CURVE), clock.naps
    batch, elapsed = engine.build([Chunk([1], 4, BLOCKS, True, True)]), 0
    for context in (5, 6, 7):
        before = elapsed
        elapsed += cost.step_ps((), 1, context)
        batch_tokens, _ = engine.step(batch, [Row(GREEDY, ())])
        half = (before + (elapsed - before) // 2) // 1000
        assert naps[-2:] == [1_000_000_007 + half, 1_000_000_007 + elapsed // 1000]
        batch.advance(batch_tokens)
    assert len(naps) == 6


def test_a_layer_of_the_paced_engine_starts_when_it_was_waited_for(clock: Clock) -> None:
    """The wait for layer 0 is over before its time comes, that for layer 1 is not."""
    engine, start_ns = paced(), clock.now_ns
    batch = engine.build([Chunk([1], 4, BLOCKS, True, True)])
    step_ns = engine.step_ps(batch) // 1000
    waits_ns = [0, 2 * step_ns]

    def before(layer: int) -> None:
        clock.now_ns += waits_ns[layer]

    engine.step(batch, [Row(GREEDY, ())], before_layer=before)
    assert clock.naps == [start_ns + step_ns // 2, start_ns + 3 * step_ns]
    batch.advance([0])
    again_ns = clock.naps[-1] + engine.step_ps(batch) // 1000
    engine.step(batch, [Row(GREEDY, ())], before_layer=lambda layer: None)
    assert abs(clock.naps[-1] - again_ns) <= 1, "a wait puts off, lateness does not"


def test_a_state_to_restore_holds_up_all_layers_of_the_paced_engine(clock: Clock) -> None:
    """What layer 1 is waited for counts from the start: nothing is computed before the state is there."""
    recipe = Recipe("model", layout_of(SIZE, state_tokens=3), 1 << 20)
    engine, start_ns = PacedEngine(recipe, compile_cost(CURVE), 12, max_length=100), clock.now_ns
    batch = engine.build([Chunk([1], 4, BLOCKS, True, True, restore=(8,))])
    step_ns = engine.step_ps(batch) // 1000
    waits_ns = [0, step_ns // 4]

    def before(layer: int) -> None:
        clock.now_ns += waits_ns[layer]

    engine.step(batch, [Row(GREEDY, ())], before_layer=before)
    whole_ns = start_ns + step_ns // 4 + step_ns
    assert all(
        abs(nap - end) <= 1 for nap, end in zip(clock.naps, (whole_ns - step_ns // 2, whole_ns), strict=True)
    )


def test_a_step_of_the_paced_engine_that_was_broken_off_takes_its_time_anew(clock: Clock) -> None:
    engine = paced()
    batch = engine.build([Chunk(PROMPT, 0, BLOCKS, True)])
    step_ns = engine.step_ps(batch) // 1000

    def before(layer: int) -> None:
        if layer == 1:
            clock.now_ns += 10**9
            raise GoneError

    with pytest.raises(GoneError):
        engine.step(batch, [Row(GREEDY, ())], before_layer=before)
    again_ns = clock.now_ns
    tokens, _ = engine.step(batch, [Row(GREEDY, ())])
    assert clock.naps[-1] == again_ns + step_ns
    assert tokens == expected_tokens(RECIPE, PROMPT, 1)


# What it needs.


def test_memory_for_fewer_than_two_blocks_is_refused() -> None:
    with pytest.raises(StartError, match="fewer than 2 blocks"):
        engine_of(num_blocks=1)


def test_the_emulated_path_loads_no_torch() -> None:
    modules = "isthmus.live.engine.emulated, isthmus.live.cluster.node, isthmus.live.cluster.stage, isthmus.cli.engines"
    code = f"import sys, {modules}; print(sorted({{'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
