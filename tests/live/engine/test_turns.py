"""Batches that take turns while others attend: the tokens of one batch, in the order of the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.core.cost.pooled import replica_of
from isthmus.core.types import Sampling
from isthmus.live.engine.batch import BatchTensors
from isthmus.live.engine.interface import Chunk, Held, HolderLost, Row
from isthmus.live.engine.mixers import Pass
from isthmus.live.engine.program import Passing
from isthmus.live.engine.turns import SELDOM, BatchTurns, rows_of
from tests.models import check_greedy

from .conftest import FolderOf
from .support import Others, engine_of, tokens_of

SIZE, BLOCKS, STEPS = 16, 8, 20
LENGTHS = (60, 33, 48, 90, 17, 75, 64)
CASES = ["llama", "mistral-window", "qwen3", "qwen3_next", "deepseek_v3", "kimi_linear"]


class Run:
    """Several prompts computed at home, the first blocks of most then moved to two holders; and a batch of decodes."""

    def __init__(self, folder: Path, batches: int, lengths: Sequence[int] = LENGTHS) -> None:
        options = {"kv_bytes": 1 << 24, "max_sequences": len(LENGTHS)}
        self.home = engine_of(folder, batches=batches, **options)
        self.others = Others(
            {name: engine_of(folder, **options) for name in ("one", "two")}, [{} for _ in lengths]
        )
        self.prompts = [tokens_of(length, seed=length) for length in lengths]
        chunks = [self._prompt(index) for index in range(len(lengths))]
        self.batch = self.home.build(chunks)
        self.rows = [Row(Sampling(temperature=0.0), []) for _ in chunks]
        self.tokens: list[list[int]] = [[chunk.tokens[0]] for chunk in chunks]

    def _prompt(self, index: int) -> Chunk:
        """The request's first decode."""
        prompt, blocks = self.prompts[index], list(range(index * BLOCKS, (index + 1) * BLOCKS))
        [logits] = self.home.forward(self.home.build([Chunk(prompt, 0, blocks, True, slot=index)]))
        held = []
        for holders, count in self._holdings(index):
            for part, holder in enumerate(holders):
                self._copy(index, blocks[:count], holder, part, len(holders))
            held.append(Held(holders, count * SIZE))
            blocks = blocks[count:] + blocks[:count]
        token = int(logits.argmax())
        return Chunk([token], len(prompt), blocks, True, True, slot=index, holdings=tuple(held))

    def _holdings(self, index: int) -> list[tuple[tuple[str, ...], int]]:
        """Of a request, blocks to go: one after the other, by heads of each, or, of the third, none."""
        count = (len(self.prompts[index]) - 1) // (2 * SIZE)
        if index == 2 or not count:
            return []
        if index % 2 and self.home.layout.num_kv_heads == 2:
            return [(("two", "one"), count)]
        return [(("one",), count), (("two",), 1)]

    def _copy(self, index: int, blocks: Sequence[int], holder: str, part: int, parts: int) -> None:
        """Each request has a place of its own there, wherever it lies at home."""
        memory, home = self.others.engines[holder].memory.split(parts), self.home.memory
        there = [index * BLOCKS * parts + at for at in range(len(blocks))]
        for block, new in zip(blocks, there, strict=True):
            for layer in range(home.layout.num_layers):
                data = home.export_heads(layer, block * SIZE, (block + 1) * SIZE, part, parts)
                memory.export(layer, new * SIZE, (new + 1) * SIZE)[:] = data
        self.others.tables[index][holder] = there

    def step(self) -> None:
        found, _ = self.home.step(self.batch, self.rows, elsewhere=self.others)
        for index, token in zip(self.batch.order, found, strict=True):
            self.tokens[index].append(token)
        self.batch.advance(found)


@pytest.mark.parametrize("family", CASES)
def test_tokens_are_those_of_one_batch(family: str, folder_of: FolderOf) -> None:
    expected = None
    for batches in (1, 2, 3, 4):
        run = Run(folder_of(family), batches)
        for _ in range(STEPS):
            run.step()
        assert expected is None or run.tokens == expected
        expected = run.tokens
        assert {thread for *_, thread in run.others.log} == threads_of(batches)
    for prompt, tokens in zip(run.prompts, run.tokens, strict=True):
        check_greedy(folder_of(family), prompt, tokens)


def threads_of(batches: int) -> set[str]:
    return {"MainThread"} if batches < 3 else {f"replica-{at}_0" for at in range(batches - 1)}


def test_two_take_turns_at_each_attention(folder_of: FolderOf) -> None:
    """The answer for one is waited for when the other's questions are on their way."""
    run = Run(folder_of("llama"), 2, (40, 50))
    run.step()
    order = list(dict.fromkeys([each[:3] for each in run.others.log]))  # two holders are asked each time
    turns = [[("answer", layer - 1, batch), ("ask", layer, batch)] for layer in range(1, 3) for batch in (0, 1)]
    last = [("answer", 2, 0), ("answer", 2, 1)]
    assert order == [("ask", 0, 0), ("ask", 0, 1), *chain.from_iterable(turns), *last]


@pytest.mark.parametrize("batches", [2, 3, 4])
def test_answers_may_wait_for_the_questions_of_all(batches: int, folder_of: FolderOf) -> None:
    """None waits for its sums before the others' queries of that layer are sent."""
    expected, run = Run(folder_of("llama"), 1), Run(folder_of("llama"), batches)
    run.others.late = run.others.await_all
    run.step()
    expected.step()
    assert run.tokens == expected.tokens


@pytest.mark.parametrize("batches", [3, 4])
def test_each_slice_runs_on_the_replica_of_the_schedule(batches: int, folder_of: FolderOf) -> None:
    run = Run(folder_of("llama"), batches, (40,) * batches)
    run.step()
    for what, layer, batch, thread in run.others.log:
        at = replica_of(batch, layer + (what == "answer"), batches)
        assert thread == f"replica-{at}_0"


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_a_lost_holder_ends_the_step_and_not_the_engine(batches: int, folder_of: FolderOf) -> None:
    expected = Run(folder_of("llama"), 1)
    run = Run(folder_of("llama"), batches)
    for _ in range(3):
        expected.step()
        run.others.gone = "one", 1
        with pytest.raises(HolderLost, match="gone"):
            run.step()
        run.others.gone = None
        run.step()
    assert run.tokens == expected.tokens


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_queries_are_sent_before_keys_and_values(family: str, folder_of: FolderOf) -> None:
    """And where they are products of their own, before these are even computed: what is kept may come late."""
    run = Run(folder_of(family), 1, (40,))
    log = run.others.log

    def note(what: str) -> Callable[[int], None]:
        return lambda layer: log.append((what, layer, 0, ""))

    run.home.step(run.batch, run.rows, note("kv"), note("enter"), elsewhere=run.others)
    layers = range(run.home.memory.layout.num_layers)
    for layer in layers:
        events = list(dict.fromkeys([what for what, at, *_ in log if at == layer]))
        first = ["ask", "enter"] if family == "deepseek_v3" else ["enter", "ask"]
        assert events == [*first, "kv", "answer"]


def test_what_stays_one_batch(folder_of: FolderOf) -> None:
    """One that waits for nobody, has prompts in it or a single row, or is followed layer by layer."""
    run, turns = Run(folder_of("llama"), 4), BatchTurns(4, time.perf_counter)

    def splits(batch: BatchTensors, **fields: Any) -> bool:
        return turns.splits(Pass(batch, run.home.memory, **fields))

    home = Chunk([7], 48, range(16, 24), True, True)
    prompt = Chunk(tokens_of(20), 0, range(24, 32), True)
    away = Chunk([7], 60, range(4), True, True, holdings=(Held(("one",), SIZE),))
    build = run.home.build
    assert splits(run.batch) and splits(build([away, home]))
    assert not splits(run.batch, on_layer=id) and not splits(run.batch, before_layer=id)
    assert not splits(build([home, home])) and not splits(build([away])) and not splits(build([away, prompt]))
    assert not splits(build([away, replace(home, samples=False)]))
    assert [each.stop - each.start for each in rows_of(7, 4)] == [1, 2, 2, 2]
    assert [each.stop - each.start for each in rows_of(2, 4)] == [1, 1]


def test_states_stay_whole_until_they_only_step(folder_of: FolderOf) -> None:
    run, turns = Run(folder_of("qwen3_next"), 2), BatchTurns(2, time.perf_counter)
    chunk = Chunk([7], 60, range(4), True, True, holdings=(Held(("one",), SIZE),))
    blocks = tuple(range(run.home.layout.state_blocks))
    for first, splits in (
        (chunk, True), (replace(chunk, snapshots=((61, blocks),)), False), (replace(chunk, restore=blocks), False)
    ):  # fmt: skip
        batch = run.home.build([first, replace(chunk, slot=1)])
        assert turns.splits(Pass(batch, run.home.memory)) is splits


class Paced:
    """A program whose passes take no more than their time: of the layers, and of those who are asked meanwhile."""

    num_slices = 3

    def __init__(self, layers_s: float, others_s: float) -> None:
        self.layers_s, self.others_s, self.now_s, self.sizes = layers_s, others_s, 0.0, list[int]()

    def passing(self, x_TN: Tensor, run: Pass) -> Passing:
        self.sizes.append(run.batch.num_rows)
        for _ in range(self.num_slices - 1):
            self.now_s += self.layers_s
            came_s = self.now_s + self.others_s * run.batch.num_rows
            yield
            self.now_s = max(self.now_s, came_s)
        self.now_s += self.layers_s
        return x_TN, x_TN


@pytest.mark.parametrize(("others_s", "batches"), [(0.1, 1), (3.0, 2)])
def test_two_take_turns_where_that_is_quicker(others_s: float, batches: int, folder_of: FolderOf) -> None:
    """Layers take a second however few rows they are for, so two batches pay where others take longer."""
    run, program = Run(folder_of("llama"), 1), Paced(1.0, others_s)
    turns, x_TN = BatchTurns(None, lambda: program.now_s), torch.zeros(len(LENGTHS), 2)
    asked = Pass(run.batch, run.home.memory, elsewhere=run.others)
    found = []
    for _ in range(12 * SELDOM):
        program.sizes.clear()
        turns.run(program, x_TN, asked)  # type: ignore[arg-type]
        found.append(len(program.sizes))
    assert found[0] == 1 and {1, 2} == set(found)
    assert found[-SELDOM:].count(batches) >= SELDOM - 1
