"""Models with latent attention, recurrent layers and experts against transformers, and their live states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from isthmus.core.errors import ConfigError, StartError
from isthmus.core.types import Sampling
from isthmus.live.engine import mixers
from isthmus.live.engine.engine import Engine
from isthmus.live.engine.interface import Chunk, Row, runs_of
from tests.models import reference_logits, reference_tokens
from tests.soak import matrix

from . import support
from .conftest import FolderOf
from .hybrids import FAMILIES
from .support import permutation, poison, relative_error, tokens_of

RECURRENT = ("qwen3_next", "kimi_linear")
NUM_BLOCKS, SIZE, SLOTS = 48, 16, 6
PROMPT = tokens_of(90, seed=11)
ANSWER = 12
GREEDY = Row(Sampling(temperature=0.0), ())
EACH = pytest.mark.parametrize("family", FAMILIES)
EACH_RECURRENT = pytest.mark.parametrize("family", RECURRENT)
EngineOf = Callable[[str], Engine]
AnswerOf = Callable[[str], list[int]]


def open_engine(folder: Path, **options: object) -> Engine:
    return support.engine_of(
        folder, **({"block_size": SIZE, "kv_bytes": 1 << 21, "max_sequences": SLOTS} | options)
    )


@pytest.fixture(scope="module")
def engine_of(folder_of: FolderOf) -> EngineOf:
    made: dict[str, Engine] = {}

    def engine(family: str) -> Engine:
        if family not in made:
            made[family] = open_engine(folder_of(family))
        poison(made[family])
        return made[family]

    return engine


@pytest.fixture(scope="module")
def answer_of(folder_of: FolderOf) -> AnswerOf:
    """What transformers answers to PROMPT."""
    return functools.cache(lambda family: reference_tokens(folder_of(family), PROMPT, ANSWER))


def step(engine: Engine, chunks: Sequence[Chunk]) -> dict[int, int]:
    """One iteration: index of each chunk that samples -> its token."""
    batch = engine.build(chunks)
    tokens, _ = engine.step(batch, [GREEDY] * len(batch.order))
    return dict(zip(batch.order, tokens, strict=True))


def decode(
    engine: Engine, first: int, start: int, blocks: Sequence[int], slot: int, count: int, **fields: object
) -> list[int]:
    """The answer of `count` tokens that begins with `first`, which stands at `start`. `fields`: of the first chunk."""
    answer = [first]
    batch = engine.build([Chunk(answer, start, blocks, True, True, slot=slot, **fields)])
    while len(answer) < count:
        answer += engine.step(batch, [GREEDY])[0]
        batch.advance(answer[-1:])
    return answer


def prefill(
    engine: Engine, tokens: Sequence[int], blocks: Sequence[int], slot: int, size: int, start: int = 0
) -> int:
    """Computes a prompt in chunks of `size`; its first token."""
    for at in range(start, len(tokens), size):
        part = tokens[at : at + size]
        found = step(engine, [Chunk(part, at, blocks, at + size >= len(tokens), slot=slot)])
    return found[0]


# ---- against transformers


@matrix("family, size", FAMILIES, [90, 1, 7, 13, 16, 48])
def test_greedy_answers_are_those_of_transformers(
    answer_of: AnswerOf, engine_of: EngineOf, family: str, size: int
) -> None:
    engine, blocks = engine_of(family), permutation(NUM_BLOCKS, seed=size)
    first = prefill(engine, PROMPT, blocks, 2, size)
    answer = decode(engine, first, len(PROMPT), blocks, 2, ANSWER)
    assert answer == answer_of(family)


@EACH
@pytest.mark.parametrize(
    ("dtype", "error", "cuts"), [("float32", 1e-4, (0, 1, 2, 5, 64, 65, 90)), ("bfloat16", 0.1, (0, 64, 90))]
)
@pytest.mark.usefixtures("selected")
def test_logits_at_every_position_are_those_of_transformers(
    folder_of: FolderOf, family: str, dtype: str, error: float, cuts: tuple[int, ...]
) -> None:
    engine, expected = open_engine(folder_of(family), dtype=dtype), reference_logits(folder_of(family), PROMPT)
    blocks = permutation(NUM_BLOCKS)
    for start, stop in pairwise(cuts):
        chunk = Chunk(PROMPT[start:stop], start, blocks, True)
        logits = engine.forward(engine.build([chunk]))[0]
        assert relative_error(logits, expected[stop - 1]) < error, stop


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_a_long_prefix_is_expanded_in_pieces(
    monkeypatch: pytest.MonkeyPatch, folder_of: FolderOf, engine_of: EngineOf, family: str
) -> None:
    monkeypatch.setattr(mixers, "EXPANDED_TOKENS", 7)
    engine, blocks = engine_of(family), permutation(NUM_BLOCKS)
    engine.forward(engine.build([Chunk(PROMPT[:45], 0, blocks, False)]))
    logits = engine.forward(engine.build([Chunk(PROMPT[45:], 45, blocks, True)]))[0]
    assert relative_error(logits, reference_logits(folder_of(family), PROMPT)[-1]) < 1e-4


@EACH
def test_requests_of_one_batch_do_not_disturb_each_other(
    folder_of: FolderOf, engine_of: EngineOf, family: str
) -> None:
    """Decodes, short chunks and long ones side by side, requests coming and going, in a hurry for slots."""
    engine, table = engine_of(family), permutation(NUM_BLOCKS, seed=9)
    prompts = [tokens_of(count, seed=count) for count in (33, 5, 70, 1, 41)]
    sizes = [40, 2, 11, 1, 20]
    arrivals = [0, 0, 1, 3, 9]
    slots = [3, 0, 5, 1, 3]  # the last takes over the first one's
    answers: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    for now in range(40):
        chunks, whose = [], []
        for index, prompt in enumerate(prompts):
            if now < arrivals[index] or len(answers[index]) == 7 or (index == 4 and len(answers[0]) < 7):
                continue
            known = prompt + answers[index]
            stop = min(done[index] + sizes[index], len(known))
            blocks = table[8 * index : 8 * index + 8]
            samples, start = stop == len(known), done[index]
            chunks.append(Chunk(known[start:stop], start, blocks, samples, slot=slots[index]))
            whose.append(index)
            done[index] = stop
        if chunks:
            order = permutation(len(chunks), seed=now)
            for at, token in step(engine, [chunks[at] for at in order]).items():
                answers[whose[order[at]]].append(token)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference_tokens(folder_of(family), prompt, 7)


# ---- snapshots


def blocks_of(engine: Engine, first: int) -> tuple[int, ...]:
    """Blocks for one snapshot, in no order."""
    found = list(range(first, first + engine.layout.state_blocks))
    return tuple(found[1:] + found[:1])


@EACH_RECURRENT
@pytest.mark.parametrize("size", [90, 23])
def test_a_snapshot_inside_a_chunk_restored_elsewhere_goes_on_alike(
    answer_of: AnswerOf, engine_of: EngineOf, family: str, size: int
) -> None:
    engine, table = engine_of(family), permutation(30, seed=4)
    positions = (16, 17, 64, 90)
    taken = {at: blocks_of(engine, 30 + 5 * index) for index, at in enumerate(positions)}
    for start in range(0, 90, size):
        stop = min(start + size, 90)
        wanted = tuple((at, taken[at]) for at in positions if start < at <= stop)
        chunk = Chunk(PROMPT[start:stop], start, table, stop == 90, slot=1, snapshots=wanted)
        whole = engine.forward(engine.build([chunk]))
    expected = answer_of(family)
    assert int(whole[0].argmax()) == expected[0]
    for slot, at in zip((4, 1, 0), positions, strict=False):
        chunk = Chunk(PROMPT[at:], at, table, True, slot=slot, restore=taken[at])
        logits = engine.forward(engine.build([chunk]))
        assert relative_error(logits, whole) < 1e-5
        answer = decode(engine, int(logits[0].argmax()), 90, table, slot, ANSWER)
        assert answer == expected
    last = engine.build([Chunk(expected[:1], 90, table, True, slot=5, restore=taken[90])])
    assert engine.step(last, [GREEDY])[0] == expected[1:2]


@EACH_RECURRENT
def test_a_snapshot_of_a_decode_is_taken_once_and_its_batch_goes_on(
    folder_of: FolderOf, engine_of: EngineOf, family: str
) -> None:
    """Beside another request, whose tokens come first in the flat order."""
    engine, taken = engine_of(family), blocks_of(engine_of(family), 30)
    tables, prompts = (list(range(10)), list(range(10, 20))), (PROMPT, tokens_of(40, seed=2))
    answers = [[prefill(engine, prompts[at], tables[at], at, 50)] for at in (0, 1)]
    chunks = [
        Chunk(answers[0], 90, tables[0], True, True, slot=0, snapshots=((91, taken),)),
        Chunk(answers[1], 40, tables[1], True, True, slot=1),
    ]
    batch = engine.build(chunks)
    assert batch.order == [1, 0]
    while len(answers[0]) < ANSWER:
        tokens, _ = engine.step(batch, [GREEDY] * 2)
        for index, token in zip(batch.order, tokens, strict=True):
            answers[index].append(token)
        batch.advance(tokens)
    expected = [reference_tokens(folder_of(family), prompt, ANSWER) for prompt in prompts]
    assert answers == expected
    assert decode(engine, expected[0][1], 91, tables[0], 3, ANSWER - 1, restore=taken) == expected[0][1:]


def sent(
    source: Engine, target: Engine, length: int, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Moves the KV of a prompt, then whole blocks, as a hand-over does: layer by layer, run by run, as bytes."""
    layout = source.layout
    (mine, theirs), *whole = pairs
    for layer in range(layout.num_layers):
        for at in range(0, length, SIZE):
            stop = min(at + SIZE, length)
            move(source, target, layer, *runs_of(mine, SIZE, at, stop), *runs_of(theirs, SIZE, at, stop))
        for froms, tos in whole:
            for one, other in zip(froms, tos, strict=True):
                move(
                    source, target, layer, (one * SIZE, one * SIZE + SIZE), (other * SIZE, other * SIZE + SIZE)
                )


def move(source: Engine, target: Engine, layer: int, one: tuple[int, int], other: tuple[int, int]) -> None:
    data = bytes(source.memory.export(layer, *one))
    landing = target.memory.landing(layer, *other)
    landing[:] = data
    target.memory.land(layer, *other, landing)


@EACH
def test_a_prompt_handed_over_is_answered_as_if_nothing_had_moved(
    folder_of: FolderOf, answer_of: AnswerOf, engine_of: EngineOf, family: str
) -> None:
    source, target = engine_of(family), open_engine(folder_of(family))
    state = blocks_of(source, 20)
    wanted = ((90, state),) if state else ()
    chunks = [
        Chunk(PROMPT[:50], 0, range(6), False, slot=2),
        Chunk(PROMPT[50:], 50, range(6), True, slot=2, snapshots=wanted),
    ]
    for chunk in chunks:
        first = step(source, [chunk])
    table, landed = permutation(20, seed=5), blocks_of(target, 25)
    sent(source, target, 90, [(range(6), table), (state, landed)])
    expected = answer_of(family)
    assert decode(target, first[0], 90, table, 0, ANSWER, restore=landed) == expected


@EACH_RECURRENT
def test_a_prompt_begins_with_an_empty_state_whatever_its_slot_held(
    answer_of: AnswerOf, engine_of: EngineOf, family: str
) -> None:
    engine = engine_of(family)
    for size in (90, 1):
        assert engine.states is not None
        engine.states._live_SLX.fill_(3.0)
        assert prefill(engine, PROMPT, range(6), 3, size) == answer_of(family)[0]
        assert bool((engine.states._live_SLX[[0, 1, 2, 4, 5]] == 3.0).all()), "other slots stay"


# ---- hooks


@EACH_RECURRENT
@pytest.mark.parametrize("broken", [0, 1])
def test_all_layers_are_awaited_before_any_state_moves_so_a_step_can_be_repeated(
    engine_of: EngineOf, family: str, broken: int
) -> None:
    engine, state = engine_of(family), blocks_of(engine_of(family), 20)
    step(engine, [Chunk(PROMPT[:64], 0, range(6), False, slot=2, snapshots=((64, state),))])
    calls: list[tuple[str, int]] = []

    def chunks() -> list[Chunk]:
        going_on = Chunk(PROMPT[64:66], 64, range(6), True, slot=2)
        return [going_on, Chunk(PROMPT[64:], 64, range(6), True, slot=1, restore=state)]

    def gone(layer: int) -> None:
        if layer == broken:
            raise ConnectionError

    batch = engine.build(chunks())
    with pytest.raises(ConnectionError):
        engine.forward(batch, before_layer=gone)
    found = engine.forward(
        batch, lambda layer: calls.append(("on", layer)), lambda layer: calls.append(("before", layer))
    )
    assert calls == [("before", 0), ("before", 1), ("on", 0), ("on", 1)]
    poison(engine)
    step(engine, [Chunk(PROMPT[:64], 0, range(6), False, slot=2, snapshots=((64, state),))])
    assert torch.equal(engine.forward(engine.build(chunks())), found)


# ---- sizes and stages


@EACH_RECURRENT
def test_live_states_take_their_memory_from_that_of_the_kv(folder_of: FolderOf, family: str) -> None:
    layout = open_engine(folder_of(family)).layout
    least = 8 * layout.state_bytes + layout.least_blocks * layout.block_bytes
    engine = open_engine(folder_of(family), max_sequences=8, kv_bytes=least + 3 * layout.block_bytes)
    assert engine.num_blocks == 3 + layout.least_blocks
    assert engine.states is not None and engine.states.max_sequences == 8
    with pytest.raises(StartError, match=f"8 sequences .*at least {least}$"):
        open_engine(folder_of(family), max_sequences=8, kv_bytes=least - 1)


@EACH_RECURRENT
def test_stages_of_a_model_with_recurrent_layers_are_refused(folder_of: FolderOf, family: str) -> None:
    with pytest.raises(ConfigError, match="recurrent layers"):
        open_engine(folder_of(family), layers=(0, 2))
