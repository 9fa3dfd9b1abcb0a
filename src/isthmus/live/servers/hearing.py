"""KV events of one plain server: which blocks it stores and removes, while every one since its start was heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from isthmus.core.node.events import EngineBlocks
from isthmus.live.servers.kv_events import EventListener, SavedBlocks, Translator, saved
from isthmus.live.servers.naming import Naming
from isthmus.live.servers.told import EventSource

log = logging.getLogger(__name__)

UNSAID_BLOCKS = 1 << 18
"""The most blocks of a server that does not say how many it has."""


class SavedHearing(msgspec.Struct, frozen=True, array_like=True):
    """What was heard of one server: all batches before `next_number`."""

    next_number: int
    blocks: SavedBlocks


class Hearing:
    """Follows a server's events until `close`, in an event loop.

    `know` is called when all events since the server's start are heard, from the first on, and `heard` then takes each
    fact; `believe` is called when some are lost. Both may be called again. `most_blocks`: that the server can have at
    once, 0 if it does not say; `earlier`: of the run before, from where it goes on. Raises zmq.ZMQError where no
    connection can be begun.
    """

    def __init__(
        self,
        source: EventSource,
        naming: Naming,
        most_blocks: int,
        heard: Callable[[EngineBlocks], None],
        know: Callable[[], None],
        believe: Callable[[], None],
        earlier: SavedHearing | None = None,
    ) -> None:
        self._tell, self._know, self._believe = heard, know, believe
        self._is_known = False
        self._translator = Translator(naming.of_events, naming.block_tokens, 2 * most_blocks or UNSAID_BLOCKS)
        if earlier is not None:
            self._translator.restore(earlier.blocks)
        self._listener = EventListener(
            source.endpoint, source.replay or None, self._heard, self._void, source.topic, self._recovered,
            start=earlier.next_number if earlier is not None else 0,
        )  # fmt: skip
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._listener.run()
        except Exception:  # a bug of ours leaves the belief
            log.exception("KV events cannot be followed")
            self._void()

    def close(self) -> None:
        self._task.cancel()

    def snapshot(self) -> Callable[[], SavedHearing | None]:
        """Returns a function that makes, in any thread, what another run goes on from; None where not all is known."""
        if not self._is_known:
            return lambda: None
        number, entries = self._listener.next_number, self._translator.entries()
        return lambda: SavedHearing(number, saved(entries))

    def _heard(self, batch: bytes) -> None:
        self._recovered()
        try:
            facts = self._translator.batch(batch)
        except (msgspec.DecodeError, RecursionError):
            self._listener.is_whole = False
            self._void()
            raise
        for fact in facts:
            self._tell(fact)

    def _recovered(self) -> None:
        if self._listener.is_whole and not self._is_known:
            self._is_known = True
            self._know()
            self._tell(EngineBlocks(self._translator.held()))

    def _void(self) -> None:
        self._translator.clear()
        self._is_known = False
        self._believe()
