"""An event loop in a thread of its own, for studies whose sides are sessions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Value = TypeVar("Value")


class Loop:
    """`run` waits for a coroutine there; `soon` calls a function there and does not wait."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.soon = self._loop.call_soon_threadsafe

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self._limit_s)

    def close(self) -> None:
        self.soon(self._loop.stop)
        self._thread.join()
        self._loop.close()
