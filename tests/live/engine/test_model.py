"""The network against transformers, for every model case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from isthmus.live.engine import kernels
from isthmus.live.engine.batch import Chunk
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.kernels.plain import PlainKernels
from tests.models import MODEL_CASES, reference_logits, reference_tokens
from tests.soak import matrix

from .conftest import FolderOf
from .support import logits_by_position, permutation, poison, relative_error, tokens_of

TOLERANCE = 1e-4
BLOCK_SIZE = 16
NUM_BLOCKS = 64
PROMPT = tokens_of(300, seed=11)
CASES = pytest.mark.parametrize("case", MODEL_CASES)
TABLES = {"contiguous": list(range(NUM_BLOCKS)), "shuffled": permutation(NUM_BLOCKS, seed=5)}

Logits = Callable[[str], Tensor]


def engine_of(folder: Path, *, num_tokens: int = NUM_BLOCKS * BLOCK_SIZE, dtype: str = "float32") -> Engine:
    """An engine of float32 or bfloat16 whose memory holds at least `num_tokens`, all of it NaN."""
    kv_bytes = num_tokens * 3 * 2 * 4 * 32 * 4  # at most 4 KV heads of size 32
    engine = Engine(folder, EngineOptions(dtype=dtype, device="cpu", block_size=BLOCK_SIZE, kv_bytes=kv_bytes))
    poison(engine)
    return engine


@pytest.fixture(scope="module")
def engines(folder_of: FolderOf) -> Callable[[str], Engine]:
    """One engine a case, poisoned anew each time it is asked for."""
    made: dict[str, Engine] = {}

    def engine(case: str) -> Engine:
        if case not in made:
            made[case] = engine_of(folder_of(case))
        poison(made[case])
        return made[case]

    return engine


@pytest.fixture(scope="module")
def expected(folder_of: FolderOf) -> Logits:
    """Logits of transformers at every position of PROMPT; attention being causal, of all its prefixes."""
    made: dict[str, Tensor] = {}

    def logits(case: str) -> Tensor:
        if case not in made:
            made[case] = reference_logits(folder_of(case), PROMPT)
        return made[case]

    return logits


def assert_logits(found: dict[int, Tensor], expected_TV: Tensor) -> None:
    assert found
    errors = {at: relative_error(logits, expected_TV[at]) for at, logits in found.items()}
    assert max(errors.values()) <= TOLERANCE, errors


# ---- one request


@matrix("case, layout, chunk", MODEL_CASES, TABLES, [1, 7, 8, 9, 16, 41, 48, 64, 512])
def test_logits_are_those_of_transformers(
    engines: Callable[[str], Engine], expected: Logits, case: str, layout: str, chunk: int
) -> None:
    for length in (1, 17) if chunk == 1 else (1, 17, 300):
        found = logits_by_position(engines(case), PROMPT[:length], TABLES[layout], chunk)
        assert length - 1 in found
        assert_logits(found, expected(case))


def test_a_long_prompt_in_chunks_is_right(folder_of: FolderOf) -> None:
    """YaRN past its original length, and, shuffled, more runs of blocks than are merged as parts."""
    prompt, folder = tokens_of(3000, seed=3), folder_of("llama-rope-yarn")
    expected_TV = reference_logits(folder, prompt)
    engine = engine_of(folder, num_tokens=3008)
    blocks = permutation(188)
    assert_logits(logits_by_position(engine, prompt, blocks, 512), expected_TV)
    poison(engine)
    whole = logits_by_position(engine, prompt[:2997], blocks, 4096)
    assert_logits(whole | logits_by_position(engine, prompt, blocks, 1, start=2997), expected_TV)


# ---- many requests


def mixed_chunks() -> tuple[list[Chunk], list[Chunk]]:
    """(chunks whose KV must be there before, chunks of the batch): prefills, short chunks and decodes."""
    shapes = [
        (0, 20, True),
        (50, 33, True),
        (11, 5, True),
        (60, 1, True),
        (0, 1, True),
        (37, 40, False),
        (5, 1, True),
    ]
    before, batch = [], []
    free = permutation(NUM_BLOCKS, seed=9)
    for number, (start, count, samples) in enumerate(shapes):
        tokens = tokens_of(start + count, seed=100 + number)
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        blocks, free = free[:num_blocks], free[num_blocks:]
        if start:
            before.append(Chunk(tokens[:start], 0, blocks, False))
        batch.append(Chunk(tokens[start:], start, blocks, samples))
    return before, batch


@CASES
def test_a_mixed_batch_equals_each_request_alone(engines: Callable[[str], Engine], case: str) -> None:
    before, chunks = mixed_chunks()
    engine = engines(case)
    for chunk in before:
        engine.forward(engine.build([chunk]))
    alone = {
        index: engine.forward(engine.build([chunk]))[0] for index, chunk in enumerate(chunks) if chunk.samples
    }
    poison(engine)
    engine.forward(engine.build(before))
    batch = engine.build(chunks)
    together = engine.forward(batch)
    assert sorted(batch.order) == sorted(alone)
    for row, index in enumerate(batch.order):
        assert relative_error(together[row], alone[index]) <= 2e-5, index


@CASES
def test_greedy_answers_are_those_of_transformers(
    engines: Callable[[str], Engine], folder_of: FolderOf, case: str
) -> None:
    """Of three requests that decode together."""
    engine, lengths = engines(case), (33, 1, 47)
    tables = [TABLES["shuffled"][row * 10 : row * 10 + 10] for row in range(3)]
    chunks = [Chunk(PROMPT[:length], 0, blocks, True) for length, blocks in zip(lengths, tables, strict=True)]
    batch = engine.build(chunks)
    first = engine.forward(batch).argmax(dim=-1).tolist()
    answers = [[token] for _, token in sorted(zip(batch.order, first, strict=True))]
    batch = engine.build([Chunk(answers[at], lengths[at], blocks, True) for at, blocks in enumerate(tables)])
    for _ in range(23):
        tokens = engine.forward(batch).argmax(dim=-1).tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
        batch.advance(tokens)
    for length, answer in zip(lengths, answers, strict=True):
        assert answer == reference_tokens(folder_of(case), PROMPT[:length], 24)


# ---- kernels and types


@CASES
def test_plain_kernels_give_the_logits_too(
    monkeypatch: pytest.MonkeyPatch, folder_of: FolderOf, expected: Logits, case: str
) -> None:
    plain = PlainKernels()
    monkeypatch.setattr(kernels, "select", lambda device: plain)
    engine = engine_of(folder_of(case))
    assert engine.kernels is plain
    for chunk, start, stop in ((64, 0, 100), (1, 100, 103), (150, 103, 300)):
        found = logits_by_position(engine, PROMPT[:stop], TABLES["shuffled"], chunk, start=start)
        assert_logits(found, expected(case))


@pytest.mark.parametrize("case", ["llama", "mistral-window", "qwen2", "qwen3", "llama-tied"])
@pytest.mark.usefixtures("selected")
def test_bfloat16_is_no_worse_than_transformers_in_bfloat16(
    folder_of: FolderOf, expected: Logits, case: str
) -> None:
    engine = engine_of(folder_of(case), dtype="bfloat16")
    found = logits_by_position(engine, PROMPT[:64], TABLES["shuffled"], 32)
    found |= logits_by_position(engine, PROMPT[:80], TABLES["shuffled"], 1, start=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(case), dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT[:80]])).logits[0].float()
    positions = sorted(found)
    exact = expected(case)[positions]
    ours = relative_error(torch.stack([found[at] for at in positions]), exact)
    assert 0 < ours <= 1.25 * relative_error(theirs[positions], exact)
