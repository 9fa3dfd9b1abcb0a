"""One request's KV in several engines: sums and tokens are those of one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.core.cost import compile_cost
from isthmus.core.errors import ProtocolError
from isthmus.core.models import Attention
from isthmus.core.types import Sampling
from isthmus.live.engine.attention import merge, partial
from isthmus.live.engine.emulated import EmulatedEngine, expected_tokens
from isthmus.live.engine.engine import Engine
from isthmus.live.engine.interface import Asking, Chunk, Held, HolderLost, HolderQueries, Row
from isthmus.live.engine.recipe import Recipe, layout_of
from tests.live.engine.test_emulated import CURVE
from tests.models import check_greedy

from .conftest import FolderOf
from .support import Others, attention, engine_of, largest_error, randn, tokens_of, visible

SIZE = 16
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


def split(total: int, draw: st.DataObject, parts: int) -> list[int]:
    cuts = sorted(draw.draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from([(4, 4), (6, 2), (6, 1)]),
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(1, 17),
    st.sampled_from([1.0, 6.0]),
)
def test_parts_anywhere_sum_to_attention(
    draw: st.DataObject, heads: tuple[int, int], dtype: torch.dtype, parts: int, scale: float
) -> None:
    """However they are cut, empty and of one token too, in any order, two by two or all at once."""
    length = draw.draw(st.integers(1, 400))
    q = randn(3, heads[0], 32, seed=1, dtype=dtype)
    kv = randn(length, 2, heads[1], 32, seed=2, dtype=dtype)
    expected, _ = attention(q, kv, visible(3, length, None), scale * 32**-0.5)
    counts = split(length, draw, parts)
    pieces = [partial(q, each, scale=scale * 32**-0.5) for each in kv.split(counts)]
    order = draw.draw(st.permutations(range(parts)))
    one = merge([pieces[at] for at in order])
    two = pieces[order[0]]
    for at in order[1:]:
        two = merge((pieces[at], two))
    for out, lse in (one, two):
        assert largest_error(out, expected) < LIMITS[dtype] and not lse.isnan().any()


class Request:
    """One that is computed at home, with KV that moves to others in whole blocks, from the front."""

    def __init__(self, home: Engine, others: Others, prompt: list[int], num_blocks: int) -> None:
        self.home, self.others, self.tokens = home, others, list(prompt)
        self.blocks, self.computed = list(range(num_blocks)), 0
        self.held: list[Held] = []
        self.there: dict[str, list[int]] = {}
        others.tables = [self.there]

    def move(self, holders: tuple[str, ...], count: int) -> None:
        """Copies the next `count` blocks that are computed and full: to one holder, or a part of the heads to each."""
        away = sum(held.num_tokens for held in self.held) // SIZE
        count = min(count, self.computed // SIZE - away)
        if count <= 0:
            return
        for part, holder in enumerate(holders):
            self._copy(holder, count, part, len(holders))
        data = self.home.memory.read_blocks(self.blocks[:count])
        poisoned = torch.full_like(data.view(torch.float32), float("nan")).view(torch.uint8)
        self.home.memory.write_blocks(self.blocks[:count], poisoned)
        self.blocks = self.blocks[count:] + self.blocks[:count]
        if self.held and self.held[-1].holders == holders:
            self.held[-1] = Held(holders, self.held[-1].num_tokens + count * SIZE)
        else:
            self.held.append(Held(holders, count * SIZE))

    def _copy(self, holder: str, count: int, part: int, parts: int) -> None:
        """Next to what is there: of the same blocks of its engine others have the rest of the heads."""
        memory, home = self.others.engines[holder].memory.split(parts), self.home.memory
        there = self.there.setdefault(holder, [])
        for block in self.blocks[:count]:
            new = len(there)
            for layer in range(home.layout.num_layers):
                data = home.export_heads(layer, block * SIZE, (block + 1) * SIZE, part, parts)
                memory.export(layer, new * SIZE, (new + 1) * SIZE)[:] = data
            there.append(new)

    def compute(self, count: int) -> Tensor:
        start = self.computed
        chunk = Chunk(
            self.tokens[start : start + count], start, self.blocks, True, slot=1, holdings=tuple(self.held)
        )
        [logits] = self.home.forward(self.home.build([chunk]), elsewhere=self.others)
        self.computed += len(chunk.tokens)
        return logits

    def decode(self) -> None:
        self.tokens.append(int(self.compute(1).argmax()))


CASES = [
    "llama",
    "llama-mha",
    "llama-mqa",
    "mistral-window",
    "qwen3",
    "qwen3_next",
    "deepseek_v3",
    "kimi_linear",
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("holders", [1, 2, 4])
def test_tokens_are_those_of_one_engine(case: str, holders: int, folder_of: FolderOf) -> None:
    """While the prompt is computed in chunks, and while it decodes; the parts are uneven."""
    folder = folder_of(case)
    others = Others({f"h{at}": engine_of(folder) for at in range(holders)}, [{}])
    prompt = tokens_of(203, seed=CASES.index(case))
    request = Request(engine_of(folder), others, prompt, 22)
    draw = torch.Generator().manual_seed(holders)
    names = list(others.engines)
    for count in (61, 5, 70, 67):
        logits = request.compute(count)
        at = next((at for at, name in enumerate(names) if name not in request.there), len(names) - 1)
        at = min(at, len(names) - 1)
        request.move((names[at],), int(torch.randint(1, 4, (), generator=draw)))
    request.tokens.append(int(logits.argmax()))
    for step in range(40):
        if step % 7 == 3:
            request.move((names[-1],), int(torch.randint(1, 4, (), generator=draw)))
        request.decode()
    assert request.computed == len(request.tokens) - 1
    assert len(request.there) >= min(2, holders) and sum(held.num_tokens for held in request.held) >= 5 * SIZE
    check_greedy(folder, prompt, request.tokens[len(prompt) :])


SHARED = [
    ("llama", (2,)), ("llama-mha", (2,)), ("llama-mha", (4,)), ("llama-mha", (2, 1)), ("mistral-window", (2,)),
    ("qwen3", (2, 1, 1)), ("qwen3_next", (2,)),
]  # fmt: skip
"""Which model, and how many share each holding."""


@pytest.mark.parametrize(("case", "sizes"), SHARED)
def test_holders_share_heads(case: str, sizes: tuple[int, ...], folder_of: FolderOf) -> None:
    """One holding after the other, each shared by so many; queries of their heads alone are sent."""
    folder, prompt = folder_of(case), tokens_of(203, seed=CASES.index(case))
    names = [tuple(f"h{at}{part}" for part in range(size)) for at, size in enumerate(sizes)]
    others = Others({holder: engine_of(folder) for holders in names for holder in holders}, [{}])
    request, last = Request(engine_of(folder), others, prompt, 22), len(names) - 1
    for at, count in enumerate((61, 5, 70, 67)):
        logits = request.compute(count)
        request.move(names[min(at, last)], 2)
    request.tokens.append(int(logits.argmax()))
    for step in range(40):
        if step % 7 == 3:
            request.move(names[-1], 2)
        others.sent.clear()
        others.received.clear()
        request.decode()
        if case in ("llama", "llama-mha"):  # 4 heads of 16 numbers
            num_layers = request.home.layout.num_layers
            assert sum(others.sent) == num_layers * len(sizes) * 4 * 16 * 4
            assert sum(others.received) == num_layers * len(sizes) * 4 * 17 * 4
    assert len(request.held) == len(sizes) and sum(held.num_tokens for held in request.held) >= 8 * SIZE
    check_greedy(folder, prompt, request.tokens[len(prompt) :])


@pytest.mark.parametrize("change", [-4, 4, -1])
def test_an_answer_of_another_size_is_none(change: int, folder_of: FolderOf) -> None:
    others = Others({"h": engine_of(folder_of("llama"))}, [{}])
    request = Request(engine_of(folder_of("llama")), others, tokens_of(41), 22)
    request.compute(40)
    request.move(("h",), 1)
    answer = others.answer

    def changed(layer: int, asking: Asking) -> memoryview:
        data = bytes(answer(layer, asking)) + bytes(8)
        return memoryview(bytearray(data[: len(data) - 8 + change]))

    others.answer = changed  # type: ignore[method-assign]
    with pytest.raises(HolderLost, match=r"it answered \d+ bytes, not \d+") as lost:
        request.compute(1)
    assert lost.value.holder == "h"


@pytest.mark.parametrize("num_bytes", [0, 4, 1, -1])
@pytest.mark.parametrize("case", ["llama", "mistral-window"])
def test_queries_of_other_rows_are_refused(case: str, num_bytes: int, folder_of: FolderOf) -> None:
    """Too few would be read past their end. `num_bytes`: fewer than that for negative ones."""
    engine = engine_of(folder_of(case))
    row = engine.spec.layers[0].mixer
    assert isinstance(row, Attention)
    whole = 4 * row.num_heads * row.head_dim
    asked = [HolderQueries((0,), 3, SIZE, 40, 0), HolderQueries((1,), 1, SIZE, 40, 0)]
    q = memoryview(bytearray(num_bytes if num_bytes >= 0 else 4 * whole + num_bytes * whole))
    with pytest.raises(ProtocolError, match=f"{q.nbytes} bytes are not the queries of 4 rows"):
        engine.attend(0, asked, q)
    assert engine.attend(0, asked, memoryview(bytearray(4 * whole))).nbytes == 4 * (whole + 4 * row.num_heads)


def test_a_batch_of_decodes_advances_with_kv_elsewhere(folder_of: FolderOf) -> None:
    """Beside one whose KV is all at home; over the end of a block."""
    folder = folder_of("mistral-window")
    home, others = engine_of(folder), Others({"h": engine_of(folder)}, [{}])
    prompts = [tokens_of(60, seed=1), tokens_of(47, seed=2)]
    away = Request(home, others, prompts[0], 8)
    first = int(away.compute(60).argmax())
    away.move(("h",), 2)
    own = list(range(10, 18))
    [logits] = home.forward(home.build([Chunk(prompts[1], 0, own, True)]))
    tokens = [[first], [int(logits.argmax())]]
    others.tables = [{}, away.there]
    chunks = [
        Chunk(tokens[1], 47, own, True, True),
        Chunk(tokens[0], 60, away.blocks, True, True, holdings=tuple(away.held)),
    ]
    batch = home.build(chunks)
    rows = [Row(Sampling(temperature=0.0), []) for _ in chunks]
    for _ in range(24):
        found, _ = home.step(batch, rows, elsewhere=others)
        for index, token in zip(batch.order, found, strict=True):
            tokens[1 - index].append(token)
        batch.advance(found)
    for prompt, answer in zip(prompts, tokens, strict=True):
        check_greedy(folder, prompt, answer)


def test_the_emulated_engine_reads_what_lies_elsewhere() -> None:
    recipe = Recipe("r", layout_of(4), 1000)
    home, other = (EmulatedEngine(recipe, compile_cost(CURVE), 16, max_length=100) for _ in range(2))
    others, prompt = Others({"h": other}, [{}]), list(range(19))
    others.tables = [{"h": [3, 1]}]
    rows = [Row(Sampling(), [])]
    home.step(home.build([Chunk(prompt[:8], 0, [0, 1], False)]), [])
    for layer in range(recipe.layout.num_layers):
        for there, here in zip((3, 1), (0, 1), strict=True):
            target = other.memory.export(layer, there * 4, there * 4 + 4)
            target[:] = home.memory.export(layer, here * 4, here * 4 + 4)
            home.memory.export(layer, here * 4, here * 4 + 4)[:] = bytes(target.nbytes)
    batch = home.build([Chunk(prompt[8:], 8, [5, 6, 7, 8], True, holdings=(Held(("h",), 8),))])
    found = home.step(batch, rows, elsewhere=others)[0]
    batch = home.build([Chunk(found[:1], 19, [5, 6, 7, 8], True, True, holdings=(Held(("h",), 8),))])
    for _ in range(4):
        [token] = home.step(batch, rows, elsewhere=others)[0]
        found.append(token)
        batch.advance([token])
    assert found == expected_tokens(recipe, prompt, 5)
