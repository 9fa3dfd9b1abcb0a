"""Prompts that others may be assembled from: found by pieces that both have, or by signatures that are alike.

A prompt is remembered once it was computed, exactly, for a request that may itself be computed with more than its own
prefix. Names, pieces, signatures and scopes are opaque here; prompts of different scopes never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from isthmus.core.conductor.events import PromptContent, Remember, Unremember
from isthmus.core.conductor.view import RequestView
from isthmus.core.reuse import SIMILAR, similarity
from isthmus.core.types import BlockName, RequestId

MAX_OWNERS = 8
"""Prompts that are known to have a piece, the latest: what all begin with is in everybody's prefix anyway."""


class Known:
    """A prompt that is remembered. `starts`: of its pieces, where each begins."""

    __slots__ = ("content", "names", "request", "starts")

    def __init__(self, request: RequestId, names: tuple[BlockName, ...], content: PromptContent) -> None:
        self.request, self.names, self.content = request, names, content
        self.starts = dict(zip(content.pieces, (0, *content.stops), strict=False))


class Prompts:
    """At most so many of them, those that were of use last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[RequestId, Known] = {}  # the least used first
        self._by_end: dict[tuple[bytes, BlockName], RequestId] = {}  # the last name stands for all before it
        self._by_scope: dict[bytes, dict[RequestId, Known]] = {}
        self._owners: dict[tuple[bytes, bytes], dict[RequestId, None]] = {}  # by scope and piece

    def remember(self, request: RequestView) -> Iterator[Remember | Unremember]:
        """Its prompt is computed."""
        arrived = request.arrived
        name, content, names = arrived.request, arrived.content, arrived.names
        if content is None or not names or not request.is_exact:
            return
        before = self._by_end.get((content.scope, names[-1]))
        if before is not None:
            self.use(before)  # it says the same, so that one will do
            return
        if name in self._known:
            yield self.forget(name)
        self._known[name] = Known(name, names, content)
        self._by_end[content.scope, names[-1]] = name
        self._by_scope.setdefault(content.scope, {})[name] = self._known[name]
        for piece in content.pieces:
            owners = self._owners.setdefault((content.scope, piece), {})
            owners[name] = None
            if len(owners) > MAX_OWNERS:
                del owners[next(iter(owners))]
        yield Remember(name)
        if len(self._known) > self._most:
            yield self.forget(next(iter(self._known)))

    def forget(self, name: RequestId) -> Unremember:
        known = self._known.pop(name)
        scope = known.content.scope
        del self._by_end[scope, known.names[-1]]
        del self._by_scope[scope][name]
        if not self._by_scope[scope]:
            del self._by_scope[scope]
        for piece in known.starts:
            owners = self._owners.get((scope, piece), {})
            owners.pop(name, None)
            if not owners:
                self._owners.pop((scope, piece), None)
        return Unremember(name)

    def use(self, name: RequestId) -> None:
        """It is of use again."""
        self._known[name] = self._known.pop(name)

    def alike(self, content: PromptContent) -> list[tuple[float, Known]]:
        """Those whose signatures are alike enough, the most alike first."""
        found = [
            (share, known)
            for known in self._by_scope.get(content.scope, {}).values()
            if (share := similarity(content.signature, known.content.signature)) >= SIMILAR
        ]
        return sorted(found, key=lambda pair: pair[0], reverse=True)

    def owners(self, scope: bytes, piece: bytes) -> Iterable[Known]:
        """Those that have this piece, the latest last."""
        return [self._known[name] for name in self._owners.get((scope, piece), ())]

    def check(self) -> None:
        assert len(self._known) <= self._most
        assert self._by_end == {(k.content.scope, k.names[-1]): k.request for k in self._known.values()}
        scoped = [name for prompts in self._by_scope.values() for name in prompts]
        assert sorted(scoped) == sorted(self._known), "a prompt is in no scope, or in two"
        for (scope, piece), owners in self._owners.items():
            assert owners, "a piece that nobody has is kept"
            for name in owners:
                known = self._known[name]
                assert known.content.scope == scope and piece in known.starts, "a piece of another prompt"
