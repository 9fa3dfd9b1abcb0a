"""Prompts assembled from others' KV: what is exact is exact (SemShareKV's and CacheBlend's properties)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from isthmus.core.reuse import CACHEBLEND, EPIC, SELECTIONS, SEMANTIC, TAIL, Packing, Passage, Selection, pack
from isthmus.core.types import Reused
from isthmus.live.engine.assembling import nearest, warped
from isthmus.live.engine.batch import PackedRows, slices_of
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.interface import Assembling, Chunk, Donated

from .conftest import FolderOf
from .support import largest_error, randn, tokens_of

SIZE = 16
ALL = replace(SEMANTIC, recompute=1.0, decay=1.0, keep=1.0, fade=0.0)
WHOLE = [replace(each, keep=1.0, fade=0.0) for each in SELECTIONS.values()]


class Prompts:
    """An engine, whose blocks are given out one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._next = engine, 0

    def blocks(self, num_tokens: int) -> list[int]:
        first, self._next = self._next, self._next - -num_tokens // SIZE
        assert self._next <= self.engine.num_blocks
        return list(range(first, self._next))

    def computed(self, tokens: Sequence[int], *, more: int = 0) -> tuple[Tensor, list[int]]:
        blocks = self.blocks(len(tokens) + more)
        return self.run(Chunk(tokens, 0, blocks, True)), blocks

    def run(self, *chunks: Chunk) -> Tensor:
        return self.engine.forward(self.engine.build(chunks))

    def assembled(self, chunk: Chunk) -> tuple[Tensor, Reused]:
        batch = self.engine.build([chunk])
        return self.engine.forward(batch), batch.reused[0]

    def kv(self, layer: int, blocks: Sequence[int], num_tokens: int) -> Tensor:
        at = np.arange(num_tokens)
        return self.engine.memory.layers[layer][np.asarray(blocks)[at // SIZE] * SIZE + at % SIZE]


@pytest.fixture
def prompts(folder_of: FolderOf) -> Prompts:
    return of_model(folder_of, "llama")


def of_model(folder_of: FolderOf, case: str) -> Prompts:
    options = EngineOptions(device="cpu", dtype="float32", kv_bytes=8 << 20)
    return Prompts(Engine(folder_of(case), options))


def donated(tokens: Sequence[int], blocks: Sequence[int]) -> Donated:
    full = len(tokens) // SIZE
    return Donated(tokens[: full * SIZE], blocks[:full])


@pytest.mark.parametrize("selection", WHOLE, ids=lambda each: each.name)
def test_of_an_identical_prompt_nothing_differs(prompts: Prompts, selection: Selection) -> None:
    tokens = tokens_of(200, 1)
    expected, blocks = prompts.computed(tokens)
    own, same = prompts.blocks(200), (Passage(0, 192, 0, 0),)
    passages = () if selection.alike else same
    chunk = Chunk(tokens, 0, own, True, assembling=Assembling(selection, (donated(tokens, blocks),), passages))
    found, reused = prompts.assembled(chunk)
    assert largest_error(found, expected) < 1e-5
    assert reused.exact == 0 and reused.moved + reused.similar > 0
    assert reused.moved + reused.similar + reused.recomputed == 200
    for layer in range(3):
        assert largest_error(prompts.kv(layer, own, 200), prompts.kv(layer, blocks, 200)) < 1e-5


@pytest.mark.parametrize("passages", [(), (Passage(40, 96, 0, 8),)])
def test_all_recomputed_is_full_prefill_whatever_the_donor(
    prompts: Prompts, passages: tuple[Passage, ...]
) -> None:
    other, tokens = tokens_of(150, 2), tokens_of(180, 3)
    _, blocks = prompts.computed(other)
    expected, _ = prompts.computed(tokens)
    chunk = Chunk(
        tokens, 0, prompts.blocks(180), True, assembling=Assembling(ALL, (donated(other, blocks),), passages)
    )
    found, reused = prompts.assembled(chunk)
    assert torch.equal(found, expected)
    assert reused == Reused(0, 0, 0, 180)


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "llama-rope-linear",
        "llama-rope-llama3",
        "llama-rope-yarn",
        "llama-head-dim",
        "qwen3",
        "llama-mqa",
    ],
)
def test_a_moved_key_is_the_key_at_its_new_place(folder_of: FolderOf, case: str) -> None:
    """Keys and values of the first layer depend on token and position alone: moved ones are those computed there."""
    prompts = of_model(folder_of, case)
    text, before, after = tokens_of(120, 4), tokens_of(70, 5), tokens_of(50, 6)
    _, blocks = prompts.computed(text + after)
    target = before + text + after[:40]
    _, fresh = prompts.computed(target)
    own = prompts.blocks(len(target))
    assembling = Assembling(EPIC, (donated(text + after, blocks),), (Passage(70, 120, 0, 0),))
    _, reused = prompts.assembled(Chunk(target, 0, own, True, assembling=assembling))
    # The passage goes on as far as both texts do, up to the prompt's last tokens.
    count = 120 + 40 - TAIL
    assert reused == Reused(0, count - EPIC.first, 0, len(target) - count + EPIC.first)
    computed, moved = (prompts.kv(0, each, len(target)) for each in (fresh, own))
    assert largest_error(moved, computed) < 2e-6
    assert torch.equal(moved[:, 1], computed[:, 1]), "values are not rotated"


@pytest.mark.parametrize("selection", [CACHEBLEND, EPIC], ids=lambda each: each.name)
def test_a_passage_at_its_old_place_is_a_cached_prefix(prompts: Prompts, selection: Selection) -> None:
    prefix, question = tokens_of(160, 7), tokens_of(60, 8)
    _, blocks = prompts.computed(prefix + tokens_of(20, 9))
    cached = blocks[:10] + prompts.blocks(60)
    expected = prompts.run(Chunk(question, 160, cached, True))
    chunk = Chunk(
        prefix + question, 0, prompts.blocks(220), True,
        assembling=Assembling(selection, (Donated(prefix, blocks[:10]),), (Passage(0, 160, 0, 0),)),
    )  # fmt: skip
    found, _ = prompts.assembled(chunk)
    assert largest_error(found, expected) < 1e-5


def test_another_word_at_the_same_place_is_computed(prompts: Prompts) -> None:
    """However alike the two words are: the donor's KV would say its own word there."""
    donor = tokens_of(200, 62)
    target, others = list(donor), range(40, 48)
    for at in others:
        target[at] = donor[at] % 200 + 1
    table = prompts.engine.model.embed
    with torch.inference_mode():
        one, other = (table(torch.tensor(each)) for each in (donor, target))
        other[others] = one[others]  # as if they were embedded alike
    _, blocks = prompts.computed(donor)
    chunk = Chunk(
        target, 0, prompts.blocks(200), True, assembling=Assembling(SEMANTIC, (donated(donor, blocks),))
    )
    rows = {tuple(donor[:192]): one[:192], tuple(target): other}
    (made,) = prompts.engine.build([chunk]).assembled
    made._embed = lambda tokens: rows[tuple(tokens.tolist())]
    found = made._counterparts(chunk)
    assert found[40:48].tolist() == [-1] * 8
    assert np.delete(found[:192], others).tolist() == [at for at in range(192) if at not in others]


@pytest.mark.parametrize("selection", WHOLE, ids=lambda each: each.name)
def test_the_last_tokens_see_all_of_the_prompt(prompts: Prompts, selection: Selection) -> None:
    """They attend to what was assembled as if it were a cached prefix, whatever was computed and whatever moved."""
    before, text, behind = tokens_of(70, 90), tokens_of(120, 91), tokens_of(40, 92)
    donor, target = [*text, *behind], [*before, *text, *tokens_of(50, 93)]
    _, blocks = prompts.computed(donor)
    own = prompts.blocks(240)
    passages = () if selection.alike else (Passage(70, 120, 0, 0),)
    found, reused = prompts.assembled(
        Chunk(target, 0, own, True, assembling=Assembling(selection, (donated(donor, blocks),), passages))
    )
    assert reused.moved + reused.similar > 40
    expected = prompts.run(Chunk(target[-TAIL:], 240 - TAIL, own, True))
    assert largest_error(found, expected) < 1e-5


def test_it_follows_a_cached_prefix(prompts: Prompts) -> None:
    """The prefix stays as it is, and what follows sees it."""
    prefix, text, end = tokens_of(64, 10), tokens_of(100, 11), tokens_of(40, 12)
    _, own = prompts.computed(prefix, more=140)
    expected, _ = prompts.computed(prefix + text + end)
    _, blocks = prompts.computed(prefix + text)
    before = prompts.kv(1, own, 64).clone()
    assembling = Assembling(CACHEBLEND, (donated(prefix + text, blocks),), (Passage(64, 96, 0, 64),))
    found, reused = prompts.assembled(Chunk(text + end, 64, own, True, assembling=assembling))
    assert reused.exact == 64 and torch.equal(prompts.kv(1, own, 64), before)
    assert largest_error(found, expected) < 1e-5, "the donor had the same before it"


def test_the_error_does_not_grow_with_what_is_computed(prompts: Prompts) -> None:
    """On the mean of several prompts."""
    errors = np.zeros(4)
    for seed in range(6):
        text, mine, other = tokens_of(160, 20 + seed), tokens_of(80, 30 + seed), tokens_of(60, 40 + seed)
        _, blocks = prompts.computed(other + text)
        _, fresh = prompts.computed(mine + text + other[:40])
        own, length = prompts.blocks(280), 280
        for at, share in enumerate((0.0, 0.2, 0.5, 1.0)):
            selection = replace(CACHEBLEND, recompute=share)
            assembling = Assembling(selection, (donated(other + text, blocks),), (Passage(80, 144, 0, 60),))
            chunk = Chunk(mine + text + other[:40], 0, own, True, assembling=assembling)
            prompts.assembled(chunk)
            errors[at] += float((prompts.kv(2, own, length) - prompts.kv(2, fresh, length)).norm())
        prompts._next -= sum(-(-count // SIZE) for count in (220, 280, 280))
    assert errors[3] < 1e-3 and (np.diff(errors) < 0).all(), errors


def test_beside_others_it_changes_nothing(prompts: Prompts) -> None:
    """A decode, a long chunk and an assembled prompt in one iteration give what each gives alone."""
    donor, target, long = tokens_of(150, 50), tokens_of(150, 51), tokens_of(90, 52)
    _, blocks = prompts.computed(donor)
    _, short = prompts.computed(tokens_of(30, 53), more=16)
    chunks = [
        Chunk([5], 30, short, True, True),
        Chunk(target, 0, prompts.blocks(150), True, assembling=Assembling(ALL, (donated(donor, blocks),))),
        Chunk(long, 0, prompts.blocks(90), True),
    ]
    alone = [prompts.run(chunk)[0] for chunk in chunks]
    batch = prompts.engine.build(chunks)
    together = prompts.engine.forward(batch)
    assert sorted(batch.order) == [0, 1, 2]
    for row, index in enumerate(batch.order):
        assert largest_error(together[row], alone[index]) < 1e-5


def test_a_step_that_was_broken_off_is_repeated_with_the_same_result(prompts: Prompts) -> None:
    donor, target = tokens_of(170, 60), tokens_of(150, 61)
    _, blocks = prompts.computed(donor)
    packing, packed = pack(SEMANTIC, 150, 3, SIZE), prompts.blocks(150)
    assert packing is not None
    assembling = Assembling(
        SEMANTIC, (donated(donor, blocks),), (Passage(30, 90, 0, 40),), packing, packed[: packing.num_packed]
    )
    chunk = Chunk(target, 0, prompts.blocks(150), True, assembling=assembling)
    expected, _ = prompts.assembled(chunk)
    batch, announced = prompts.engine.build([chunk]), list[int]()

    def break_off(layer: int) -> None:
        if layer == 2 and not announced:
            announced.append(layer)
            raise RuntimeError("not here yet")

    with pytest.raises(RuntimeError, match="not here yet"):
        prompts.engine.forward(batch, before_layer=break_off)
    announced_layers = list[int]()
    found = prompts.engine.forward(batch, announced_layers.append, break_off)
    assert torch.equal(found, expected) and announced_layers == [0, 1, 2]


# Packing.


@pytest.mark.parametrize("kept", [(8, 8, 8), (8, 5, 3), (6, 6, 1), (1, 1, 1)])
def test_what_is_packed_is_what_was_kept(prompts: Prompts, kept: tuple[int, ...]) -> None:
    """In every layer the slots that a row attends to are the tokens with most of the tail's attention, in order, and
    then the prompt's end."""
    donor, tokens = tokens_of(170, 70), tokens_of(170, 71)
    _, blocks = prompts.computed(donor)
    own, packing = prompts.blocks(186), Packing(8, kept)
    packed = prompts.blocks(packing.num_packed * SIZE)
    assembling = Assembling(ALL, (donated(donor, blocks),), (), packing, packed)
    batch = prompts.engine.build([Chunk(tokens, 0, own, True, assembling=assembling)])
    prompts.engine.forward(batch)
    row = decode_of(prompts, packing, packed, own, 170)
    rows = PackedRows([row], prompts.engine.num_blocks, SIZE, torch.tensor([171 - packing.num_dropped * SIZE]))
    for layer, count in enumerate(kept):
        tables, lens = rows.at(layer, torch.tensor([171 - packing.num_dropped * SIZE]))
        assert int(lens[0]) == count * SIZE + 171 - 128
        at = np.arange(int(lens[0]) - 1)
        found = prompts.engine.memory.whole[tables[0].numpy()[at // SIZE] * SIZE + at % SIZE]
        whole = prompts.kv(layer, own, 170)
        chosen = batch.assembled[0]._kept[layer]
        assert torch.equal(chosen, chosen.sort().values) and len(chosen.unique()) == count * SIZE
        assert torch.equal(found, torch.cat((whole[chosen], whole[128:])))
    places = np.concatenate(slices_of(packing, packed, prompts.engine.num_blocks))
    assert len(set(places.tolist())) == sum(kept), "no two slices lie in one place"


def decode_of(prompts: Prompts, packing: Packing, packed: list[int], own: list[int], position: int) -> Chunk:
    blocks = packed + own[packing.num_blocks :]
    return Chunk([7], position, blocks, True, True, packing=packing)


def test_answers_go_on_after_packing(prompts: Prompts) -> None:
    """If all is kept, packing changes no logit; step by step, into new blocks, beside a request that was not packed."""
    donor, tokens = tokens_of(90, 72), tokens_of(170, 73)
    _, blocks = prompts.computed(donor)
    first, plain = prompts.computed(tokens, more=40)
    own, packing = prompts.blocks(210), Packing(8, (8, 8, 8))
    packed = prompts.blocks(128)
    assembling = Assembling(ALL, (donated(donor, blocks),), (), packing, packed)
    found, _ = prompts.assembled(Chunk(tokens, 0, own, True, assembling=assembling))
    assert torch.equal(found, first)
    chunks = [Chunk([7], 170, plain, True, True), decode_of(prompts, packing, packed, own, 170)]
    batch = prompts.engine.build(chunks)
    for step in range(24):
        one, other = prompts.engine.forward(batch)
        assert largest_error(other, one) < 1e-6, step
        batch.advance([int(one.argmax())] * 2)


# Which tokens are alike.


def test_the_same_tokens_at_the_same_places_are_found_there() -> None:
    rows, at = randn(40, 64, seed=1)[torch.tensor(tokens_of(300, 80)) % 40], torch.arange(300)
    assert nearest(rows, rows, at, at, least=0.6).tolist() == list(range(300))


def test_without_rotation_tokens_are_drawn_to_other_copies() -> None:
    """SemShareKV's reason to rotate embeddings before they are hashed."""
    rows, at = randn(12, 64, seed=2)[torch.tensor(tokens_of(400, 81)) % 12], torch.arange(400)
    rows = rows + 0.01 * randn(400, 64, seed=3)  # so that no place decides between equals
    noisy = rows + 0.2 * randn(400, 64, seed=4)
    right = [
        float((nearest(noisy, rows, at, at, least=0.6, rotated=rotated) == at).float().mean())
        for rotated in (True, False)
    ]
    assert right[0] > 0.9 and right[1] < 0.3, right


def test_what_is_like_nothing_has_no_counterpart() -> None:
    at = torch.arange(100)
    found = nearest(randn(100, 512, seed=5), randn(100, 512, seed=6), at, at, least=0.6)
    assert (found < 0).all()
    assert nearest(randn(10, 64), randn(10, 64), at[:10], at[:10] + 5000, least=0.6).tolist() == [-1] * 10


def test_a_sentence_more_moves_what_follows() -> None:
    text = tokens_of(400, 82)
    target = text[:100] + tokens_of(30, 83) + text[100:300] + text[340:]
    at, there = np.arange(len(target)), np.arange(400)
    found = warped(target, at, text, there)
    assert (found[:96] == there[:96]).all()
    assert (found[104:296] == there[104:296] + 30).all()
    assert (found[344:] == there[344:] - 10).all()
    assert (np.diff(found) >= 0).all() or (np.diff(found)[300:340] < 1).any()
    unrelated = tokens_of(400, 84)
    assert (warped(unrelated, np.arange(400), text, there) == there).all()
    assert warped([1, 2], np.arange(2), [3], np.arange(1)).tolist() == [0.0]
