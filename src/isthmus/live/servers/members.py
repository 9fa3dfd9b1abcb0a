"""Which servers there are to be: entries, each a URL or the name of several, and the URLs that they stand for now.

The command line, the file and the operator add and remove entries. An entry that is a DNS name or a Kubernetes label is
looked up again every `LOOK_UP_S`; a look-up that fails changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from isthmus.core.errors import RequestError
from isthmus.live.servers.lookup import LookUpError, look_up, names_several

log = logging.getLogger(__name__)

LOOK_UP_S = 3.0
LIMIT_S = 5.0
"""How long one look-up may take."""
MAX_URLS = 1024
"""That one entry may stand for."""

URLs = tuple[str, ...]


class Members:
    """Entries in the order in which they came. `want` is told all URLs, each once, whenever they change."""

    def __init__(self, entries: Sequence[str], want: Callable[[URLs], None]) -> None:
        self._first, self._want = entries, want
        self._urls: dict[str, URLs] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._looked: dict[str, asyncio.Event] = {}
        self.reasons: dict[str, str] = {}
        """Why an entry's last look-up failed."""

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Looks up all entries once, then again and again inside the context."""
        try:
            self.change(add=self._first)
            await self.looked_up(self._first)
            yield
        finally:
            looking = [*self._looking.values()]
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)

    def change(self, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> None:
        """Adds entries that are not there, and removes others, all or nothing. Raises RequestError."""
        for entry in remove:
            self._check_entry(entry)
        for entry in remove:
            self._urls.pop(entry, None)
            if entry in self._looking:
                self._looking.pop(entry).cancel()
                self._looked.pop(entry).set()
                self.reasons.pop(entry, None)
        for entry in add:
            if entry in self._urls:
                continue
            self._urls[entry] = () if names_several(entry) else (entry,)
            if names_several(entry):
                self._looked[entry] = asyncio.Event()
                self._looking[entry] = asyncio.get_running_loop().create_task(self._follow(entry))
        self._tell()

    @property
    def entries(self) -> list[str]:
        return list(self._urls)

    def urls(self, entry: str) -> URLs:
        """Returns the URLs that an entry stands for now."""
        return self._urls.get(entry, ())

    async def looked_up(self, entries: Sequence[str]) -> None:
        """Returns when each of these entries has been looked up, or is removed."""
        for event in [self._looked[entry] for entry in entries if entry in self._looked]:
            await event.wait()

    def _check_entry(self, entry: str) -> None:
        if entry in self._urls:
            return
        of = next((name for name, urls in self._urls.items() if entry in urls), None)
        if of is not None:
            raise RequestError(f"{entry} is one of {of}: remove that, or take the server out there")
        known = ", ".join(self._urls) or "none"
        raise RequestError(f"{entry} is not here; there are {known}")

    def _tell(self) -> None:
        self._want(tuple(dict.fromkeys([url for urls in self._urls.values() for url in urls])))

    async def _follow(self, entry: str) -> None:
        looked = self._looked[entry]
        while True:
            try:
                async with asyncio.timeout(LIMIT_S):
                    found = await look_up(entry)
                if len(found) > MAX_URLS:
                    raise LookUpError(f"it stands for {len(found):,} servers, and {MAX_URLS:,} is the limit")
            except (LookUpError, TimeoutError) as error:
                self._failed(entry, str(error) or f"no answer within {LIMIT_S:g} s")
            except Exception as error:  # a bug of ours ends no watch
                log.exception("%s: a look-up failed", entry)
                self._failed(entry, str(error))
            else:
                self.reasons.pop(entry, None)
                if found != self._urls[entry]:
                    if looked.is_set():
                        log.warning("%s: now %s", entry, ", ".join(found) or "nobody")
                    self._urls[entry] = found
                    self._tell()
            looked.set()
            await asyncio.sleep(LOOK_UP_S)

    def _failed(self, entry: str, reason: str) -> None:
        """Says a reason once."""
        if self.reasons.get(entry) != reason:
            log.warning("%s: %s; its servers stay as they are", entry, reason)
        self.reasons[entry] = reason
