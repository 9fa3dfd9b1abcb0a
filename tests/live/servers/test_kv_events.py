"""What a vLLM server says of its memory: its events in our names, and all of them, in order, or none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.node.events import EngineBlocks
from isthmus.live.servers import kv_events
from isthmus.live.servers.kv_events import EventListener, Translator
from tests.live.servers.fake_server import Publisher

SIZE = 4
LAYOUT = KVLayout("float32", SIZE, 2, 2, 8)
LIMIT_S = 60


def namer(salt: str = "") -> BlockNamer:
    return BlockNamer(revision="r", layout=LAYOUT, salt=salt)


def translator() -> Translator:
    return Translator(
        lambda salt, adapter: namer(salt) if salt in ("", "tenant") and not adapter else None, SIZE
    )


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
            "block_size": SIZE, "lora_id": None, "medium": "GPU"} | fields  # fmt: skip


def removed(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | fields


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any]) -> bytes:
    """As vLLM sends it: an array, with more at its end than is read here."""
    return msgspec.msgpack.encode([1.5, list(events), 0])


TOKENS = list(range(1, 13))
NAMES = tuple(namer().names(TOKENS))


@pytest.mark.parametrize("hashes", [[7, 8, 9], [b"7" * 32, b"8" * 32, b"9" * 32]])
def test_blocks_get_their_names_from_their_tokens(hashes: list[Any]) -> None:
    found = translator()
    assert found.batch(batch(stored(hashes[:2], TOKENS[:8]))) == [EngineBlocks(NAMES[:2])]
    assert found.batch(batch(stored(hashes[2:], TOKENS[8:], hashes[1]))) == [EngineBlocks(NAMES[2:])]
    assert found.batch(batch(removed(hashes[1:]))) == [EngineBlocks(removed=NAMES[1:])]


def test_tenants_have_names_of_their_own_and_strangers_none() -> None:
    """The salt is an extra key of the first block alone; what follows it has its namer from its parent."""
    found, names = translator(), tuple(namer("tenant").names(TOKENS))
    salted = stored([7, 8], TOKENS[:8], extra_keys=[["tenant"], None])
    assert found.batch(batch(salted)) == [EngineBlocks(names[:2])]
    assert found.batch(batch(stored([9], TOKENS[8:], 8))) == [EngineBlocks(names[2:])]
    assert not set(names) & set(NAMES)
    assert found.batch(batch(stored([17], TOKENS[:4], extra_keys=[["stranger"]]))) == []
    assert found.batch(batch(stored([18], TOKENS[4:8], 17))) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 2 * SIZE},
        {"lora_name": "adapter", "lora_id": 1},
        {"extra_keys": [["tenant", "more"]]},
        {"extra_keys": [[["image", 3]]]},
        {"extra_keys": [None, ["image"]]},
        {"medium": "CPU"},
    ],
)
def test_blocks_that_are_not_of_tokens_alone_are_passed_over(fields: dict[str, Any]) -> None:
    found = translator()
    assert found.batch(batch(stored([7, 8], TOKENS[:8], **fields))) == []
    assert found.batch(batch(stored([9], TOKENS[8:], 8))) == []
    assert found.batch(batch(removed([7, 8, 9]))) == []


def test_adapters_have_names_of_their_own() -> None:
    """An adapter's name is the first extra key of each of its blocks, a salt the next one of the first."""
    other = {("", "a"): "a", ("salt", "a"): "a salt"}
    found = Translator(lambda salt, adapter: namer(other[salt, adapter]), SIZE)
    fields = {"lora_name": "a", "extra_keys": [["a"], ["a"]]}
    assert found.batch(batch(stored([7, 8], TOKENS[:8], **fields))) == [
        EngineBlocks(tuple(namer("a").names(TOKENS[:8])))
    ]
    salted = {"lora_name": "a", "extra_keys": [["a", "salt"], ["a"]]}
    assert found.batch(batch(stored([17, 18], TOKENS[:8], **salted))) == [
        EngineBlocks(tuple(namer("a salt").names(TOKENS[:8])))
    ]
    image = {"lora_name": "a", "extra_keys": [["a", ["image", 3]], ["a"]]}
    assert found.batch(batch(stored([27, 28], TOKENS[:8], **image))) == []


def test_groups_of_layers_have_hashes_of_their_own() -> None:
    found = translator()
    facts = found.batch(batch(stored([7], TOKENS[:4], group_idx=0), stored([7], TOKENS[4:8], group_idx=1)))
    assert facts == [EngineBlocks(NAMES[:1]), EngineBlocks(tuple(namer().names(TOKENS[4:8])))]
    assert found.batch(batch(removed([7], group_idx=0))) == [EngineBlocks(removed=NAMES[:1])]


def test_after_all_is_cleared_nothing_is_known() -> None:
    found = translator()
    facts = found.batch(batch(stored([7], TOKENS[:4]), CLEARED, stored([8], TOKENS[4:8], 7), removed([7])))
    assert facts == [EngineBlocks(NAMES[:1]), EngineBlocks(cleared=True)]


def test_events_of_a_later_version_are_passed_over() -> None:
    later = {"type": "BlockMoved", "block_hashes": [7]}
    assert translator().batch(batch(later, stored([7], TOKENS[:4], shiny=1))) == [EngineBlocks(NAMES[:1])]
    with pytest.raises(msgspec.DecodeError):
        translator().batch(b"\xc1")


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))
def test_what_is_held_less_what_is_dropped_is_what_is_there(steps: list[tuple[int, bool]]) -> None:
    """Blocks of one chain are stored and removed as vLLM does it: each copy by itself, of any block that is there."""
    found, tokens = translator(), list(range(24))
    names, copies = namer().names(tokens), [0] * 6
    told: dict[Any, int] = {}
    for at, remove in steps:
        if remove and copies[at]:
            copies[at] -= 1
            facts = found.batch(batch(removed([at])))
        elif not remove and (at == 0 or copies[at - 1]):
            copies[at] += 1
            parent = at - 1 if at else None
            facts = found.batch(batch(stored([at], tokens[at * SIZE : (at + 1) * SIZE], parent)))
        else:
            continue
        for fact in facts:
            for name in fact.stored:
                told[name] = told.get(name, 0) + 1
            for name in fact.removed:
                told[name] -= 1
        assert [told.get(name, 0) for name in names] == copies


# Over sockets.


class Heard:
    """What a listener told, in order; "void" for that."""

    def __init__(self, publisher: Publisher, *, replay: bool = True) -> None:
        self.told: list[bytes | str] = []
        self._changed = asyncio.Event()
        self.listener = EventListener(
            publisher.endpoint, publisher.replay if replay else None, self._tell, lambda: self._tell("void")
        )

    def _tell(self, what: bytes | str) -> None:
        self.told.append(what)
        self._changed.set()
        if what == b"bad":
            raise msgspec.DecodeError("bad")

    async def until(self, *expected: bytes | str) -> None:
        while len(self.told) < len(expected):
            self._changed.clear()
            await self._changed.wait()
        assert self.told == list(expected)


@contextlib.asynccontextmanager
async def listening(publisher: Publisher, *, replay: bool = True) -> AsyncIterator[Heard]:
    """It is connected, and has asked for what was before."""
    heard = Heard(publisher, replay=replay)
    tasks = [asyncio.create_task(heard.listener.run()), asyncio.create_task(publisher.serve())]
    try:
        await publisher.subscribed()
        yield heard
    finally:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in done), done


@contextlib.asynccontextmanager
async def publishing(folder: Path, replay_s: float = LIMIT_S) -> AsyncIterator[Publisher]:
    publisher = Publisher(f"ipc://{folder / 'events'}", f"ipc://{folder / 'replay'}")
    try:
        with mock.patch.object(kv_events, "REPLAY_S", replay_s):
            async with asyncio.timeout(LIMIT_S):
                yield publisher
    finally:
        publisher.close()


async def test_what_is_both_replayed_and_published_is_heard_once(tmp_path: Path) -> None:
    async with publishing(tmp_path) as publisher:
        publisher.may_answer.clear()
        async with listening(publisher) as heard:
            for number, said in enumerate((b"a", b"b", b"c")):
                publisher.say(number, said)
            publisher.may_answer.set()
            publisher.say(3, b"d")
            await heard.until(b"a", b"b", b"c", b"d")


async def test_a_gap_is_filled_by_asking_again(tmp_path: Path) -> None:
    async with publishing(tmp_path) as publisher, listening(publisher) as heard:
        publisher.say(0, b"a")
        await heard.until(b"a")
        publisher.say(1, b"b", lost=True)
        publisher.say(2, b"c", lost=True)
        publisher.say(3, b"d")
        publisher.say(4, b"e")
        await heard.until(b"a", b"b", b"c", b"d", b"e")
        assert publisher.asked[-1] == 1


@pytest.mark.parametrize("how", ["not kept", "silent", "no replay"])
async def test_after_a_gap_that_cannot_be_filled_all_before_is_void(how: str, tmp_path: Path) -> None:
    async with (
        publishing(tmp_path, 0.1 if how == "silent" else LIMIT_S) as publisher,
        listening(publisher, replay=how != "no replay") as heard,
    ):
        publisher.say(0, b"a")
        await heard.until(b"a")
        publisher.answers = how != "silent"
        publisher.say(1, b"b", lost=True, keep=False)
        publisher.say(2, b"c", lost=True, keep=False)
        publisher.say(3, b"d")
        publisher.say(4, b"e")
        await heard.until(b"a", "void", b"d", b"e")


@pytest.mark.parametrize(("before", "missed"), [(1, False), (3, False), (3, True)])
async def test_a_server_that_begins_anew_has_nothing_of_before(
    before: int, missed: bool, tmp_path: Path
) -> None:
    """Its numbers begin at 0 again, whether or not that batch is heard."""
    async with publishing(tmp_path) as publisher, listening(publisher) as heard:
        old = [b"old %d" % number for number in range(before)]
        for number, said in enumerate(old):
            publisher.say(number, said)
        await heard.until(*old)
        publisher.kept.clear()
        publisher.say(0, b"new 0", lost=missed)
        publisher.say(1, b"new 1")
        await heard.until(*old, "void", b"new 0", b"new 1")
