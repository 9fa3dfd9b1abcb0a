"""Letters that came before the head's word of their attempt: two sessions have no common order."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from isthmus.types import NodeId, RequestId

MAX_EARLY = 4096
"""More are of attempts that never begin here."""


class Early:
    """The last ones, by who said it and the key of its attempt."""

    def __init__(self) -> None:
        self._letters: OrderedDict[tuple[NodeId, RequestId], Any] = OrderedDict()

    def put(self, peer: NodeId, letter: Any) -> None:
        self._letters[peer, letter.key] = letter
        if len(self._letters) > MAX_EARLY:
            self._letters.popitem(last=False)

    def take(self, peer: NodeId, key: RequestId) -> Any | None:
        """What `peer` said of an attempt that begins or ends now."""
        return self._letters.pop((peer, key), None)
