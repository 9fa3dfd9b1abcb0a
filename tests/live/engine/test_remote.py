"""One request's KV in several engines: sums and tokens are those of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isthmus.core.errors import ProtocolError
from isthmus.core.models import Attention
from isthmus.live.engine.engine import Engine
from isthmus.live.engine.interface import Asking, Chunk, Held, HolderLost, HolderQueries
from tests.models import check_greedy

from .conftest import FolderOf
from .support import Others, copy_heads, engine_of, tokens_of

SIZE = 16


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
            there = self.there.setdefault(holder, [])
            engine = self.others.engines[holder]
            there += copy_heads(self.home, self.blocks[:count], engine, len(there), part, len(holders))
        data = self.home.memory.read_blocks(self.blocks[:count])
        poisoned = torch.full_like(data.view(torch.float32), float("nan")).view(torch.uint8)
        self.home.memory.write_blocks(self.blocks[:count], poisoned)
        self.blocks = self.blocks[count:] + self.blocks[:count]
        if self.held and self.held[-1].holders == holders:
            self.held[-1] = Held(holders, self.held[-1].num_tokens + count * SIZE)
        else:
            self.held.append(Held(holders, count * SIZE))

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
    ("llama", (1,)), ("llama", (2,)), ("llama-mha", (1, 1, 1, 1)), ("llama-mha", (2,)), ("llama-mha", (4,)),
    ("llama-mha", (2, 1)), ("llama-mqa", (1, 1)), ("mistral-window", (1, 1)), ("mistral-window", (2,)),
    ("qwen3", (1, 1)), ("qwen3", (2, 1, 1)), ("qwen3_next", (1, 1)), ("qwen3_next", (2,)), ("deepseek_v3", (1, 1)),
    ("deepseek_v3", (1,)), ("kimi_linear", (1, 1, 1, 1)),
]  # fmt: skip
"""Which model, and how many share each holding."""


@pytest.mark.parametrize(("case", "sizes"), CASES)
def test_tokens_are_those_of_one_engine(case: str, sizes: tuple[int, ...], folder_of: FolderOf) -> None:
    """While the prompt is computed in chunks, and while it decodes; the parts are uneven, and queries of a holder's
    heads alone are sent."""
    folder, prompt = folder_of(case), tokens_of(203, seed=len(case))
    names = [tuple(f"h{at}{part}" for part in range(size)) for at, size in enumerate(sizes)]
    others = Others({holder: engine_of(folder) for holders in names for holder in holders}, [{}])
    request, last = Request(engine_of(folder), others, prompt, 22), len(names) - 1
    for at, count in enumerate((61, 5, 70, 67)):
        logits = request.compute(count)
        request.move(names[min(at, last)], 1 + at % 3)
    request.tokens.append(int(logits.argmax()))
    for step in range(40):
        if step % 7 == 3:
            request.move(names[-1], 1 + step % 2)
        others.sent.clear()
        others.received.clear()
        request.decode()
        if case in ("llama", "llama-mha"):  # 4 heads of 16 numbers
            num_layers = request.home.layout.num_layers
            assert sum(others.sent) == num_layers * len(sizes) * 4 * 16 * 4
            assert sum(others.received) == num_layers * len(sizes) * 4 * 17 * 4
    assert request.computed == len(request.tokens) - 1
    assert len(request.held) == len(sizes) and sum(held.num_tokens for held in request.held) >= 6 * SIZE
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
