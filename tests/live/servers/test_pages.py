"""Pages of a worker on their way into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from isthmus.core.blocks import KVLayout, seal
from isthmus.core.node import events
from isthmus.core.types import RequestId
from isthmus.live.servers import wire
from isthmus.live.servers.pages import Pages
from isthmus.live.store import Arena, Shape, Store

NAMES = (b"a" * 16, b"b" * 16)
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", form="f")
SHAPE = Shape(LAYOUT.num_layers, LAYOUT.slice_bytes)


class SlowCache:
    """Adopts when it is told to."""

    def __init__(self) -> None:
        self.layout, self.store = LAYOUT, Store(Arena(SHAPE, 4))
        self.adopts: list[Callable[[], None]] = []

    def adopt(
        self,
        names: Sequence[bytes],
        take: Callable[[Sequence[bytes]], int],
        done: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.adopts.append(lambda: done(names[take(names) :]))

    def kept(self) -> Future[object]:
        found: Future[object] = Future()
        found.set_result(None)
        return found


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(90):
        while not holds():
            await asyncio.sleep(0.005)


def test_a_connection_that_ends_in_a_save_takes_no_slot_back_that_becomes_a_block(tmp_path: Path) -> None:
    async def run() -> None:
        cache, pages, told = SlowCache(), Pages(tmp_path / "pages"), list[Any]()

        def tell(fact: Any) -> None:
            told.append(fact)
            if isinstance(fact, events.SlotsFilled):
                pages.adopt(events.AdoptBlocks(fact.key, fact.names))

        await pages.listen()
        pages.serve(cache, tell, lambda names: None)  # type: ignore[arg-type]
        pages.begin(RequestId("r"), NAMES)
        staging = Arena(SHAPE, 2)
        staging.memory[:] = bytes([at % 251 for at in range(len(staging.memory))])
        assert staging.handle is not None
        seals = tuple([tuple([seal(staging.slice(slot, layer)) for layer in (0, 1)]) for slot in (0, 1)])
        _, writer = await asyncio.open_unix_connection(tmp_path / "pages")
        writer.write(wire.frame(wire.Open(wire.PROTOCOL, "f", "m", 4, staging.handle)))
        writer.write(wire.frame(wire.Save("r", 0, None, NAMES, (0, 1), seals)))
        await until(lambda: cache.adopts)
        writer.close()
        await until(lambda: any(task.cancelling() for task in asyncio.all_tasks()))  # the save is broken off
        assert len(cache.store.reserve(4)) == 2, "two are still on their way"
        cache.adopts[0]()
        await until(lambda: events.SavesDone(RequestId("r")) in told)
        assert all(cache.store.contains(name) for name in NAMES)
        cache.store.check()
        await pages.close()
        staging.close()
        cache.store.close()

    asyncio.run(run())
