"""The emulated model in pipeline stages: the same tokens, the same time, and every wrong byte between them shows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import ProtocolError
from isthmus.core.types import Sampling
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of
from isthmus.live.engine.interface import Chunk, Hidden, Row, split_layers

SIZE, NUM_LAYERS = 4, 5
RECIPE = Recipe("model", layout_of(SIZE, layers=NUM_LAYERS), 1 << 20)
COST = compile_cost(Curve(kv_token_bytes=8, num_layers=5, prefill_token_s=1.1e-5, decode_fixed_s=3e-3))
ROW = Row(Sampling(temperature=0.0), ())
PROMPT = [random.Random(2).randrange(1000) for _ in range(19)]


def engines_of(stages: int) -> list[EmulatedEngine]:
    return [
        EmulatedEngine(RECIPE, COST, 12, max_length=1000, layers=layers)
        for layers in split_layers(NUM_LAYERS, stages)
    ]


def tokens_of(stages: list[EmulatedEngine], *chunks: Chunk) -> list[int]:
    """One iteration through the stages. Each uses other blocks than the one before, counted from the other end."""
    hidden = None
    for number, engine in enumerate(stages):
        own = chunks if number % 2 else [mirrored(chunk) for chunk in chunks]
        batch = engine.build(own)
        if number + 1 < len(stages):
            hidden = engine.relay(batch, hidden=hidden)
    return engine.step(batch, [ROW] * len(batch.order), hidden=hidden)[0]


def mirrored(chunk: Chunk) -> Chunk:
    return Chunk(
        chunk.tokens, chunk.start, [11 - block for block in chunk.blocks], chunk.samples, salt=chunk.salt
    )


@settings(max_examples=40)
@given(
    st.integers(1, NUM_LAYERS),
    st.lists(st.integers(0, 300), min_size=1, max_size=20),
    st.permutations(range(12)),
    st.integers(1, 25),
    st.sampled_from(["", "tenant"]),
)
def test_stages_answer_what_is_expected_of_the_whole(
    num_stages: int, prompt: list[int], blocks: list[int], chunk: int, salt: str
) -> None:
    stages, answer = engines_of(num_stages), list[int]()
    for start in range(0, len(prompt), chunk):
        piece = prompt[start : start + chunk]
        last = start + len(piece) == len(prompt)
        answer += tokens_of(stages, Chunk(piece, start, blocks, last, salt=salt))
    while len(answer) < 4:
        at = len(prompt) + len(answer) - 1
        answer += tokens_of(stages, Chunk(answer[-1:], at, blocks, True, salt=salt))
    assert answer == expected_tokens(RECIPE, prompt, 4, salt=salt)


def test_stages_name_blocks_like_the_whole_model_and_hold_only_their_layers() -> None:
    for engine, num_layers in zip(engines_of(2), (3, 2), strict=True):
        assert (engine.revision, engine.layout) == (RECIPE.revision, RECIPE.layout)
        assert engine.memory.layout.num_layers == len(engine.memory.layers) == num_layers


@given(st.data())
def test_any_bit_flipped_between_stages_changes_the_token(data: st.DataObject) -> None:
    first, last = engines_of(2)
    chunk = Chunk(PROMPT, 0, range(5), True)
    hidden = first.relay(first.build([chunk]))
    damaged = bytearray(hidden.data)
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    wrong = Hidden(hidden.shape, hidden.dtype, memoryview(damaged))
    tokens, _ = last.step(last.build([chunk]), [ROW], hidden=wrong)
    assert tokens != expected_tokens(RECIPE, PROMPT, 1)


@pytest.mark.parametrize("damage", ["short", "long", "type"])
def test_hidden_states_that_do_not_fit_the_batch_are_a_peers_error(damage: str) -> None:
    first, last = engines_of(2)
    chunk = Chunk(PROMPT, 0, range(5), True)
    data = bytes(first.relay(first.build([chunk])).data)
    data = {"short": data[:-1], "long": data + b"?", "type": data}[damage]
    hidden = Hidden((len(data),), "float32" if damage == "type" else "uint8", memoryview(data))
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes"):
        last.step(last.build([chunk]), [ROW], hidden=hidden)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_the_time_of_a_step_is_shared_out_to_the_picosecond(num_stages: int) -> None:
    chunks = [Chunk(PROMPT[:7], 0, range(5), True), Chunk([1], 9, range(3), True, decodes=True)]
    stages = engines_of(num_stages)
    shares = [engine.step_ps(engine.build(chunks)) for engine in stages]
    assert sum(shares) == COST.step_ps([(7, 0)], 1, 10)
    for (one, left), (other, right) in pairwise(
        (e.layers, share) for e, share in zip(stages, shares, strict=True)
    ):
        assert abs(left * (other[1] - other[0]) - right * (one[1] - one[0])) <= NUM_LAYERS
