"""The worker side, without vLLM: threads that load and save, and the link they speak through."""

from __future__ import annotations

from isthmus.live.servers.wire import PROTOCOL, Free, Open, Ready, Short, ToWorker
from isthmus.live.store.arena import Arena, Shape
from isthmus_vllm.link import Link
from isthmus_vllm.loads import Abort, Loader, Lost, Opened
from isthmus_vllm.pages import Area, Pages
from isthmus_vllm.plans import Plan, Report
from isthmus_vllm.saves import Saver, Slots


class Worker:
    """Loads and saves pages; no method blocks. `staging_bytes`: for saved blocks that the adapter has not fetched yet,
    at least one block."""

    def __init__(
        self,
        path: str,
        pages: Pages,
        *,
        form: str,
        model: str,
        block_size: int,
        staging_bytes: int,
        timeout_s: float,
    ) -> None:
        shape = Shape(pages.num_layers, pages.slice_bytes)
        num_slots = max(1, staging_bytes // shape.block_bytes)
        arena = Arena(shape, num_slots)
        if arena.handle is None:
            raise OSError("this system has no memory that two processes may share")
        staging = Area(arena)
        pages.adopt_staging(staging)
        self._pages = pages
        self._slots = Slots(num_slots)
        hello = Open(PROTOCOL, form, model, block_size, arena.handle)
        self._link = Link(path, hello, arena.fileno(), self)
        self._loader = Loader(pages, self._link.send, timeout_s)
        self._saver = Saver(pages, staging, self._slots, self._link.send)
        self._is_connected = False
        self._was_connected: bool | None = None
        for thread in (self._link, self._loader, self._saver):
            thread.start()

    def load(self, plan: Plan) -> None:
        """Queues the plan's loads and aborts."""
        for order in plan.loads:
            self._loader.put(order)
        for load in plan.aborts:
            self._loader.put(Abort(load))

    def save(self, plan: Plan) -> None:
        """Queues the plan's saves, after the forward that fills their blocks was started."""
        if plan.saves or plan.over:
            self._saver.put(plan, self._pages.mark() if plan.saves else None)

    def take_outcomes(self) -> dict[str, bool]:
        """As `Loader.take_outcomes`."""
        return self._loader.take_outcomes()

    def take_report(self) -> Report:
        """Returns news since the last call; a lost connection is reported each time until it is back."""
        is_connected = self._is_connected
        news = None if is_connected and self._was_connected else is_connected
        self._was_connected = is_connected
        return self._saver.take_report() + Report(connected=news)

    def stop(self) -> None:
        self._link.stop()
        self._loader.stop()
        self._saver.stop()

    # Called by the link, on its thread.

    def opened(self, session: int, arena: Area) -> None:
        self._loader.put(Opened(session, arena))
        self._slots.open(session)
        self._is_connected = True

    def received(self, session: int, message: ToWorker) -> None:
        if isinstance(message, Ready | Short):
            self._loader.put(message)
        elif isinstance(message, Free):
            self._slots.free(session, message.slots)
        else:
            raise ValueError(f"{type(message).__name__} has no place here")

    def lost(self, session: int) -> None:
        self._is_connected = False
        self._slots.close()
        self._loader.put(Lost(session))
