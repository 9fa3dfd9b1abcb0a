"""Scores of a prompt's tokens against transformers, however the prompt is cut, and whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isthmus.core.types import Sampling, TokenLogprobs
from isthmus.live.engine import sampling
from isthmus.live.engine.engine import Engine
from isthmus.live.engine.interface import Chunk, Hidden, Row, split_layers
from isthmus.live.engine.sampling import score
from tests.models import reference_logits
from tests.soak import matrix

from .conftest import FolderOf
from .support import engine_of, permutation, randn, tokens_of

NUM_BLOCKS, SIZE, TOP = 40, 16, 5
PROMPT = tokens_of(150, seed=21)
BLOCKS = permutation(NUM_BLOCKS, seed=3)
GREEDY = Row(Sampling(temperature=0.0), ())
TOLERANCE = 2e-4
CASES = [
    "llama",
    "llama-tied",
    "qwen2-tied-shards",
    "mistral-window",
    "qwen3_next",
    "kimi_linear",
    "deepseek_v3",
]
Found = dict[int, TokenLogprobs]


def chunks_of(prompt: Sequence[int], size: int, blocks: Sequence[int] = BLOCKS) -> list[Chunk]:
    """A prompt to be scored, in chunks."""
    return [
        Chunk(
            prompt[at : at + size], at, blocks, at + size >= len(prompt),
            targets=prompt[at + 1 : at + size + 1], num_top=TOP,
        )
        for at in range(0, len(prompt), size)
    ]  # fmt: skip


def scored(engine: Engine, chunks: Sequence[Chunk], hidden: Hidden | None = None) -> list[Found]:
    """One iteration: of each chunk, by position. Nothing is told twice or out of order."""
    batch, found = engine.build(chunks), [dict[int, TokenLogprobs]() for _ in chunks]

    def told(index: int, position: int, told: Sequence[TokenLogprobs]) -> None:
        assert position == chunks[index].start + 1 + len(found[index])
        found[index] |= dict(enumerate(told, start=position))

    engine.step(batch, [GREEDY] * len(batch.order), hidden=hidden, on_scores=told)
    assert [len(each) for each in found] == [len(chunk.targets) for chunk in chunks]
    return found


def all_of(engine: Engine, prompt: Sequence[int], size: int) -> Found:
    found: Found = {}
    for chunk in chunks_of(prompt, size):
        found |= scored(engine, [chunk])[0]
    return found


def check(found: Found, prompt: Sequence[int], logits_TV: Tensor, num_top: int = TOP) -> None:
    """Every token but the first, as these logits have it."""
    assert list(found) == list(range(1, len(prompt)))
    logprobs_TV = logits_TV.log_softmax(-1)
    for position, each in found.items():
        expected_V, chosen = logprobs_TV[position - 1], float(logprobs_TV[position - 1, prompt[position]])
        assert each.chosen == pytest.approx(chosen, abs=TOLERANCE)
        least = 1 + int((expected_V > chosen + 2 * TOLERANCE).sum())
        assert least <= each.rank <= int((expected_V >= chosen - 2 * TOLERANCE).sum())
        tokens, values = zip(*each.top, strict=True)
        assert values == pytest.approx(expected_V.topk(num_top).values.tolist(), abs=TOLERANCE)
        assert values == pytest.approx(expected_V[list(tokens)].tolist(), abs=TOLERANCE)
        assert len(set(tokens)) == num_top


@matrix("case, size", CASES, [1, 2, 7, 8, 9, 16, 31, 64, 149, 150, 512])
def test_they_are_those_of_transformers(folder_of: FolderOf, case: str, size: int) -> None:
    check(all_of(engine_of(folder_of(case)), PROMPT, size), PROMPT, reference_logits(folder_of(case), PROMPT))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_of_short_prompts_too(folder_of: FolderOf, length: int) -> None:
    for size in (1, 2, 3):
        found = all_of(engine_of(folder_of("llama")), PROMPT[:length], size)
        check(found, PROMPT[:length], reference_logits(folder_of("llama"), PROMPT[:length]))


@pytest.mark.parametrize("limits", [(1, 1 << 20), (272 * 7, 1 << 20), (1 << 30, 1), (1 << 30, 6 * 50)])
def test_however_many_at_a_time(
    monkeypatch: pytest.MonkeyPatch, folder_of: FolderOf, limits: tuple[int, int]
) -> None:
    monkeypatch.setattr(sampling, "MAX_LOGITS", limits[0])
    monkeypatch.setattr(sampling, "MAX_ENTRIES", limits[1])
    check(
        all_of(engine_of(folder_of("llama")), PROMPT, 60), PROMPT, reference_logits(folder_of("llama"), PROMPT)
    )


def test_beside_others_who_do_not_ask_and_who_are_answered_as_ever(folder_of: FolderOf) -> None:
    """Two to be scored, each with its own number of tops, a prompt that is not, and a decode: their logits keep every
    bit."""
    path, tables = folder_of("llama-tied"), [BLOCKS[at : at + 10] for at in range(0, 40, 10)]
    others = [tokens_of(20, seed=5), tokens_of(6, seed=6)]
    chunks = [
        Chunk(others[0], 0, tables[0], True),
        replace(chunks_of(PROMPT[:40], 100, tables[1])[0], num_top=1),
        Chunk([9], 0, tables[2], True, True),
        chunks_of(others[1], 100, tables[3])[0],
    ]
    engine = engine_of(path)
    expected = engine.forward(engine.build([replace(chunk, targets=()) for chunk in chunks]))
    assert torch.equal(engine.forward(engine.build(chunks), on_scores=lambda *told: None), expected)
    found = scored(engine, chunks)
    check(found[1], PROMPT[:40], reference_logits(path, PROMPT[:40]), num_top=1)
    check(found[3], others[1], reference_logits(path, others[1]))


@pytest.mark.parametrize("case", ["llama", "llama-tied"])
def test_the_last_stage_scores_what_one_engine_does(folder_of: FolderOf, case: str) -> None:
    whole, stages = (
        engine_of(folder_of(case)),
        [engine_of(folder_of(case), layers=each) for each in split_layers(3, 3)],
    )
    for chunk in chunks_of(PROMPT, 41):
        hidden = None
        for stage in stages[:-1]:
            hidden = stage.relay(stage.build([chunk]), hidden=hidden)
        assert scored(stages[-1], [chunk], hidden) == scored(whole, [chunk])


def test_of_equal_logits_none_is_likelier() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    found = score(logits, [2, 3], 0)
    assert [each.rank for each in found] == [1, 1] and [each.top for each in found] == [(), ()]
    assert score(logits, [3, 1], 2)[0].rank == 3


def test_no_more_than_all_tokens_are_told() -> None:
    [found] = score(randn(1, 6), [4], 20)
    assert sorted(token for token, _ in found.top) == list(range(6))
    assert dict(found.top)[4] == found.chosen and found.top[found.rank - 1][0] == 4
