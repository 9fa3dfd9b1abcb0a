"""The side that gives: what it refuses to answer, and what it holds for whom. Sessions are stood for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core.blocks import seal
from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.types import NodeId, RequestId
from isthmus.live.kv import loans
from isthmus.live.kv.cache import NodeCache
from isthmus.live.kv.loans import Loans
from isthmus.live.messenger import Priority
from isthmus.live.peers.messages import Ended, Given, Lent, Pull
from tests.live.cluster.fault_peers import LAYOUT, kv_block, put_chain, store_of

KEY, OTHER_KEY, PEER, OTHER = RequestId("a#1"), RequestId("b#1"), NodeId("peer"), NodeId("other")
COUNT = 6
NAMES = tuple([bytes([number]) * 16 for number in range(COUNT)])
BLOCKS = [kv_block(LAYOUT, number) for number in range(COUNT)]
PULL = Pull(KEY, 0, COUNT)


class Line:
    """Stands for a session. Nothing that was sent has arrived before `deliver`."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, list[bytes]]] = []
        self._waiting: list[Callable[[bool], object]] = []
        self.num_cancelled = 0

    def send(
        self,
        message: Any,
        *payload: memoryview,
        priority: Priority | None = None,
        done: Callable[[bool], object] | None = None,
    ) -> Line:
        self.sent.append((message, [bytes(part) for part in payload]))
        if done is not None:
            self._waiting.append(done)
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    def deliver(self, arrived: bool = True) -> None:
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(arrived)

    def of(self, kind: type) -> list[Any]:
        return [message for message, _ in self.sent if isinstance(message, kind)]


class Kit:
    """Loans of a node that has all blocks."""

    def __init__(self) -> None:
        self.store = store_of(LAYOUT, COUNT + 2)
        put_chain(self.store, NAMES, BLOCKS)
        self.cache = NodeCache(LAYOUT, self.store)
        self.tasks: list[asyncio.Task[None]] = []
        self.loans = Loans(self.cache, self._spawn)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    def ask(self, line: Line, pull: Pull = PULL, peer: NodeId = PEER, stop: int = COUNT) -> None:
        """The node decided to give blocks up to `stop`, and they are asked for."""
        self.loans.give(events.Give(pull.key, peer, NAMES, 0, stop, 0))
        self.loans.pull(line, peer, pull)  # type: ignore[arg-type]

    def enough(self, key: RequestId = KEY, peer: NodeId = PEER) -> None:
        self.loans.end(events.EndGive(key, peer))

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.001)

    def held(self) -> tuple[int, int]:
        stat = self.store.stat()
        return stat.num_pinned, stat.num_reserved


Work = Callable[[Kit, Line], Awaitable[None]]


@pytest.fixture
def run() -> Callable[[Work], None]:
    """Afterwards nothing may be held."""

    def main(work: Work) -> None:
        async def whole() -> None:
            kit, line = Kit(), Line()
            await work(kit, line)
            for at in list(kit.loans._loans):
                kit.enough(*at)
            line.deliver(arrived=False)
            await asyncio.gather(*kit.tasks, return_exceptions=True)
            assert kit.held() == (0, 0)
            kit.cache.close()
            kit.store.close()

        asyncio.run(whole())

    return main


def test_what_is_given_is_what_was_decided_in_one_form(run: Callable[[Work], None]) -> None:
    async def work(kit: Kit, line: Line) -> None:
        kit.ask(line, replace(PULL, start=1, room=3), stop=COUNT - 1)
        await kit.until(lambda: line.of(Ended))
        assert line.of(Ended) == [Ended(KEY, 3)]
        for layer, (message, payload) in enumerate(line.sent[:3]):
            at = layer * LAYOUT.slice_bytes
            slices = [block[at : at + LAYOUT.slice_bytes] for block in BLOCKS[1:4]]
            assert (message, payload) == (Given(KEY, layer, 0, tuple(map(seal, slices))), slices)
        assert kit.held() == (3, 0), "its peer has not got it"
        line.deliver()
        assert kit.held() == (0, 0)
        assert kit.loans.bytes_out == 3 * LAYOUT.block_bytes

    run(work)


@pytest.mark.parametrize(
    "changes",
    [{"codec": "rot13"}, {"room": -1}, {"start": -1}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_be_given_is_refused(run: Callable[[Work], None], changes: dict[str, Any]) -> None:
    async def work(kit: Kit, line: Line) -> None:
        with pytest.raises(ProtocolError):
            kit.ask(line, replace(PULL, **changes))
        assert not line.sent and not kit.tasks

    run(work)


def test_one_pull_at_a_time(run: Callable[[Work], None]) -> None:
    async def work(kit: Kit, line: Line) -> None:
        kit.ask(line, replace(PULL, room=2))
        with pytest.raises(ProtocolError, match="a second Pull"):
            kit.loans.pull(line, PEER, PULL)  # type: ignore[arg-type]
        await kit.until(lambda: line.of(Ended))
        kit.loans.pull(line, PEER, replace(PULL, start=2))  # type: ignore[arg-type]
        await kit.until(lambda: len(line.of(Ended)) == 2)
        assert line.of(Ended) == [Ended(KEY, 2), Ended(KEY, COUNT - 2)]

    run(work)


def test_what_is_asked_for_before_the_node_decided_waits_for_that(
    run: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so many; and it is given what was decided last for it, and nobody else."""
    monkeypatch.setattr(loans, "MAX_PULLS", 2)

    async def work(kit: Kit, line: Line) -> None:
        for key in (RequestId("never#1"), OTHER_KEY, KEY):
            kit.loans.pull(line, PEER, replace(PULL, key=key))  # type: ignore[arg-type]
        kit.loans.give(events.Give(KEY, OTHER, NAMES, 0, COUNT, 0))
        kit.loans.give(events.Give(RequestId("never#1"), PEER, NAMES, 0, COUNT, 0))
        assert not kit.tasks
        kit.enough(OTHER_KEY)
        kit.loans.give(events.Give(OTHER_KEY, PEER, NAMES, 0, COUNT, 0))
        assert not kit.tasks, "it asked for nothing since"
        for stop in (2, 3):
            kit.loans.give(events.Give(KEY, PEER, NAMES, 0, stop, 0))
        kit.loans.pull(line, PEER, PULL)  # type: ignore[arg-type]
        await kit.until(lambda: line.of(Ended))
        assert line.of(Ended) == [Ended(KEY, 3)]

    run(work)


def test_only_who_got_it_has_enough_of_it(run: Callable[[Work], None]) -> None:
    async def work(kit: Kit, line: Line) -> None:
        kit.ask(line)
        kit.enough(OTHER_KEY)
        kit.enough(KEY, OTHER)
        kit.loans.lost(OTHER)
        await kit.until(lambda: line.of(Ended))
        assert len(kit.loans._loans) == 1
        kit.loans.lost(PEER)
        assert not kit.loans._loans

    run(work)


def test_no_more_than_two_batches_wait_for_a_peer_that_takes_nothing(
    run: Callable[[Work], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loans, "GIVE_BLOCKS", 1)

    async def work(kit: Kit, line: Line) -> None:
        kit.ask(line)
        await kit.until(lambda: len(line.of(Given)) == 2 * LAYOUT.num_layers)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(line.of(Given)) == 2 * LAYOUT.num_layers and kit.held() == (2, 0)
        await kit.until(lambda: line.deliver() or line.of(Ended))

    run(work)


@pytest.mark.parametrize("how", ["enough", "lost", "closed"])
def test_a_borrower_that_goes_leaves_nothing_pinned(run: Callable[[Work], None], how: str) -> None:
    """Also in the midst of what is sent to it."""

    async def work(kit: Kit, line: Line) -> None:
        kit.ask(line)
        await kit.until(lambda: line.of(Given))
        assert kit.held()[0]
        if how == "enough":
            kit.enough()
        elif how == "lost":
            kit.loans.lost(PEER)
        else:
            kit.loans.close()
        await kit.until(lambda: kit.tasks[0].done())
        assert line.num_cancelled == len(line.of(Given))
        line.deliver(arrived=False)
        assert kit.held() == (0, 0)

    run(work)


def test_what_is_lent_stays_until_it_is_given_back(run: Callable[[Work], None]) -> None:
    async def work(kit: Kit, line: Line) -> None:
        kit.loans._host = "this one"
        kit.ask(line, replace(PULL, host="this one"))
        await kit.until(lambda: line.of(Lent))
        (lent,) = line.of(Lent)
        assert [len(seals) for seals in lent.seals] == [LAYOUT.num_layers] * COUNT == [3] * len(lent.slots)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert kit.held() == (COUNT, 0) and not line.of(Given)
        kit.store.drop(NAMES)
        taken = kit.store.reserve(COUNT + 2)
        assert not set(taken) & set(lent.slots)
        for slot, block in zip(lent.slots, BLOCKS, strict=True):
            assert bytes(kit.store.arena.slot(slot)) == block, "somebody else wrote there"
        kit.enough()
        kit.store.give_back(taken)
        await kit.until(lambda: kit.held() == (0, 0))

    run(work)


def test_to_another_host_nothing_is_lent(run: Callable[[Work], None]) -> None:
    async def work(kit: Kit, line: Line) -> None:
        kit.loans._host = "this one"
        kit.ask(line, replace(PULL, host="another"))
        await kit.until(lambda: line.of(Ended))
        assert not line.of(Lent)

    run(work)


def test_a_block_that_went_meanwhile_ends_what_is_given(run: Callable[[Work], None]) -> None:
    async def work(kit: Kit, line: Line) -> None:
        kit.store.drop(NAMES[3:])
        kit.ask(line)
        await kit.until(lambda: line.of(Ended))
        assert line.of(Ended) == [Ended(KEY, 3)]

    run(work)
