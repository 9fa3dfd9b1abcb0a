"""Attention to KV of this node's attempts that lies with other nodes: asked over lines, by threads that compute.

How KV gets there is in `shipments.py`; a line is opened beside the session with a holder, and ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec

from isthmus.core.types import NodeId, RequestId
from isthmus.live.engine.interface import Asking, HolderLost
from isthmus.live.messenger import Asker, LineLost, Question
from isthmus.live.peers.messages import KNOWN_ROWS, Attend
from isthmus.live.peers.sessions import Peers, Spawn

_encode = msgspec.msgpack.Encoder().encode


class _Line:
    """Where one holder is asked, by several threads."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self._lock = threading.Lock()
        self._told: dict[int, Asking] = {}
        """Whose rows it knows, by number."""
        self._next = 0

    def ask(self, layer: int, asking: Asking, keys: Sequence[RequestId], q: memoryview) -> Question:
        """`keys`: of the chunks. Raises LineLost."""
        with self._lock:
            number, rows = self._number_of(asking), tuple[Any, ...]()
            if number is None:
                number, self._next = self._next, (self._next + 1) % KNOWN_ROWS
                rows = tuple([(keys[chunk], *rest) for chunk, *rest in asking.chunks])
            question = self.asker.ask(_encode(Attend(layer, number, rows, asking.parts)), q)
            self._told[number] = asking
            return question

    def _number_of(self, asking: Asking) -> int | None:
        """Of the very rows, for those that are equal may be of other requests."""
        for number, known in self._told.items():
            if known is asking:
                return number
        return None


class HolderLines:
    """Lines to holders. `open_line` in the event loop; `remote` gives what the engine's thread asks. `answer_s`: how
    long a holder may take."""

    def __init__(self, peers: Peers, spawn: Spawn, answer_s: float) -> None:
        self._peers, self._spawn, self._answer_s = peers, spawn, answer_s
        self._lines: dict[NodeId, Future[_Line]] = {}
        self.bytes_asked = self.bytes_answered = self.num_asked = 0

    def open_line(self, holder: NodeId) -> None:
        """One to each holder: a new one where the last is over."""
        line = self._lines.get(holder)
        if line is not None and (not line.done() or _works(line)):
            return
        opened = self._lines[holder] = Future()
        # Nobody waits for what is not opened any more.
        self._spawn(self._open(holder, opened)).add_done_callback(lambda _: opened.cancel())

    async def _open(self, holder: NodeId, opened: Future[_Line]) -> None:
        try:
            session = await self._peers.dialled(holder)
            opened.set_result(_Line(await session.line(self._answer_s)))
        except (OSError, TimeoutError) as error:
            opened.set_exception(LineLost(str(error)))

    def lost(self, holder: NodeId) -> None:
        line = self._lines.pop(holder, None)
        if line is not None and line.done() and _works(line):
            line.result().asker.hang_up()

    # Attention there.

    def remote(self, keys: Sequence[RequestId]) -> Remote:
        """For one run over chunks of these attempts."""
        return Remote(self, keys)

    def line_of(self, holder: str) -> _Line:
        """From the engine's thread. Raises HolderLost."""
        try:
            return self._lines[NodeId(holder)].result(self._answer_s)
        except (KeyError, LineLost, TimeoutError, CancelledError) as error:
            raise HolderLost(holder, "there is no line to it") from error


def _works(line: Future[_Line]) -> bool:
    return not line.cancelled() and line.exception() is None and not line.result().asker.is_over


class Remote:
    """`isthmus.live.engine.interface.Elsewhere` over lines. `keys`: of the run's chunks."""

    def __init__(self, holders: HolderLines, keys: Sequence[RequestId]) -> None:
        self._holders, self._keys = holders, keys
        self._asked: dict[tuple[int, str, int, int], tuple[Asker, Question]] = {}

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        holder, first = asking.holder, asking.chunks[0][0]
        line = self._holders.line_of(holder)
        try:
            question = line.ask(layer, asking, self._keys, q)
        except LineLost as lost:
            raise self._lost(line.asker, holder, lost) from None
        self._asked[layer, holder, asking.part, first] = line.asker, question
        self._holders.num_asked += 1
        self._holders.bytes_asked += q.nbytes

    def answer(self, layer: int, asking: Asking) -> memoryview:
        asker, question = self._asked.pop((layer, asking.holder, asking.part, asking.chunks[0][0]))
        try:
            data = asker.answer(question)
        except LineLost as lost:
            raise self._lost(asker, asking.holder, lost) from None
        if data is None:
            raise HolderLost(asking.holder, "it has no KV of this attempt")
        self._holders.bytes_answered += data.nbytes
        return data

    @staticmethod
    def _lost(asker: Asker, holder: str, lost: LineLost) -> HolderLost:
        asker.hang_up()
        return HolderLost(holder, str(lost))
