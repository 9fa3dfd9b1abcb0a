from __future__ import annotations

import pytest
import torch

from isthmus.live.engine.batch import ROW_TOKENS, Batch, Chunk, build_batch

CPU = torch.device("cpu")
SIZE = 4


def slots(chunk: Chunk) -> list[int]:
    return [chunk.blocks[at // SIZE] * SIZE + at % SIZE for at in range(chunk.start, chunk.stop)]


LONG = Chunk(list(range(100, 120)), 6, [9, 2, 3, 11, 5, 6, 20], False)
SHORT = Chunk([7, 8, 9], 2, [1, 0], True)
DECODE = Chunk([42], 8, [30, 31, 29], True)
LONG_SAMPLED = Chunk(list(range(ROW_TOKENS + 1)), 0, [40, 50, 45], True)


def test_rows_come_first_single_tokens_before_others_and_every_token_keeps_its_place() -> None:
    batch = build_batch([LONG, SHORT, LONG_SAMPLED, DECODE], SIZE, CPU)
    flat = [DECODE, SHORT, LONG, LONG_SAMPLED]
    assert batch.tokens_T.tolist() == [token for chunk in flat for token in chunk.tokens]
    assert batch.positions_T.tolist() == [at for chunk in flat for at in range(chunk.start, chunk.stop)]
    assert batch.slots_T.tolist() == [slot for chunk in flat for slot in slots(chunk)]
    assert batch.num_tokens == 20 + 3 + 9 + 1 and batch.num_rows == 4
    assert batch.lens_R.tolist() == [9, 3, 4, 5]
    assert [row[:2] for row in batch.tables_RB.tolist()] == [[30, 31], *[[1, 0]] * 3]
    found = [(prefill.first, prefill.last, prefill.start, prefill.stop) for prefill in batch.prefills]
    assert found == [(4, 24, 6, 26), (24, 33, 0, 9)]


def test_samples_are_last_tokens_and_order_says_whose() -> None:
    batch = build_batch([LONG, SHORT, LONG_SAMPLED, DECODE], SIZE, CPU)
    assert batch.order == [3, 1, 2]
    assert batch.tokens_T[batch.sample_S].tolist() == [42, 9, ROW_TOKENS]


@pytest.mark.parametrize(
    ("chunks", "only"),
    [
        ([DECODE, DECODE], True),
        ([DECODE, SHORT], False),
        ([DECODE, LONG], False),
        ([LONG_SAMPLED], False),
        ([Chunk([1], 0, [0], False)], False),
        ([DECODE, Chunk([1], 0, [0], False)], False),
    ],
)
def test_only_single_sampled_tokens_are_decodes(chunks: list[Chunk], only: bool) -> None:
    assert build_batch(chunks, SIZE, CPU).only_decodes is only


def test_advance_equals_building_the_next_batch() -> None:
    """Across block borders, over blocks in any order."""
    tables = [[8, 3, 5, 0, 11, 7], [2, 1, 12, 9, 4, 6]]
    starts = [3, 9]
    batch = build_batch([Chunk([50 + row], starts[row], tables[row], True) for row in range(2)], SIZE, CPU)
    for step in range(1, 12):
        tokens = [step, 100 + step]
        batch.advance(tokens)
        expected = build_batch(
            [Chunk([tokens[row]], starts[row] + step, tables[row], True) for row in range(2)], SIZE, CPU
        )
        assert_same(batch, expected)


def assert_same(batch: Batch, expected: Batch) -> None:
    for name in ("tokens_T", "positions_T", "slots_T", "tables_RB", "lens_R", "sample_S"):
        found, wanted = getattr(batch, name), getattr(expected, name)
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype, name
    assert (batch.order, batch.prefills) == (expected.order, expected.prefills)


@pytest.mark.parametrize("chunks", [[LONG_SAMPLED], [DECODE, SHORT], [Chunk([1], 0, [0], False)]])
def test_a_batch_with_anything_but_decodes_does_not_advance(chunks: list[Chunk]) -> None:
    batch = build_batch(chunks, SIZE, CPU)
    with pytest.raises(AssertionError):
        batch.advance([1] * len(chunks))
