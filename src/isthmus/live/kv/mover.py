"""What a node decides about bytes, carried out: of cached blocks; and for one engine, a whole model or one pipeline
stage's layers, of the KV in its memory.

Knows no rule: it takes actions in their order and reports facts. Sessions live in the event loop, where what comes from
another thread is done after all that came before; loads and saves begin at once, in threads of the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from functools import partial
from typing import Any, cast, get_args

from isthmus.core.errors import ProtocolError
from isthmus.core.node import events
from isthmus.core.node.letters import Letter
from isthmus.core.scheduler import Preempted, Saved
from isthmus.core.types import BlockName, NodeId, RequestId, Span
from isthmus.live.engine.interface import KVBytes
from isthmus.live.kv.cache import BlockStaging, EngineCache, Loading, NodeCache
from isthmus.live.kv.fetches import Fetcher, Fetching
from isthmus.live.kv.handover import HandoverReceiver, HandoverSender, Outgoing
from isthmus.live.kv.hosting import Attends, HolderLines, HostedKV
from isthmus.live.kv.loans import Loans, Shipments
from isthmus.live.messenger import Session
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import NoPayloads, Peers, Spawn, Tell

LETTERS = frozenset(get_args(Letter))


class BlockMover(NoPayloads):
    """`tell`: hears facts, in the event loop, and never from within `do`. `spawn` owns what it starts.
    `shares_memory`: reads blocks of nodes here where they lie."""

    def __init__(
        self,
        *,
        cache: NodeCache | None,
        peers: Peers,
        tell: Tell,
        spawn: Spawn,
        shares_memory: bool,
    ) -> None:
        self._cache, self._peers, self._spawn, self._told = cache, peers, spawn, tell
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._fetcher: Fetcher | None = None
        self._loans = Loans(cache, spawn)
        if cache is not None:
            self._fetcher = Fetcher(cache, peers.get, self._tell, shares_memory=shares_memory)
        self._fetches: dict[RequestId, Fetching] = {}  # whose end the node does not know
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.SendLetter: lambda action: self._post(peers.say, action.peer, action.letter),
            events.AdoptBlocks: self._adopt,
            events.Promote: lambda action: self.cache.promote(action.names),
            events.Demote: lambda action: self.cache.demote(action.names),
            events.DropBlocks: lambda action: self.cache.drop(action.names),
            events.Fetch: self._fetch,
            events.EndFetch: lambda action: self._post(self._end_fetch, action.key),
            events.Give: lambda action: self._post(self._loans.give, action),
            events.EndGive: lambda action: self._post(self._loans.end, action),
            events.ReleaseResources: lambda action: self._post(self._release_sessions, action.key),
        }
        self._heard: dict[type, Callable[[Session, NodeId, Any], None]] = {
            messages.FetchedSlices: lambda session, _, given: self.fetcher.receive(session, given),
            messages.LentBlocks: lambda session, _, lent: self.fetcher.answer(session, lent),
            messages.FetchServed: lambda session, _, ended: self.fetcher.answer(session, ended),
            messages.Pull: self._loans.pull,
        }
        self._takers: dict[type, Any] = (
            {messages.FetchedSlices: self._fetcher} if self._fetcher is not None else {}
        )
        """Who takes what comes with a payload."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call it in the event loop, before anything else."""
        self._loop, self._thread = loop, threading.get_ident()

    async def close(self) -> None:
        """Answers no other node any more, and waits for none. Cache and store stay open."""
        self._loans.close()
        if self._fetcher is not None:
            self._fetcher.close()

    def do(self, action: events.Action) -> None:
        """Carries it out, or begins to. In the event loop or the worker's thread, one at a time."""
        self._handlers[type(action)](action)

    def gauges(self) -> dict[str, float]:
        """Present state and totals, by metric name."""
        found: dict[str, float] = {"seal_mismatches_total": 0}
        if self._cache is not None and self._fetcher is not None:
            found |= self._cache.store.stat().gauges()
            found["kv_bytes_fetched_total"] = self._fetcher.bytes_in
            found["kv_bytes_borrowed_total"] = self._fetcher.bytes_lent
            found["kv_bytes_given_total"] = self._loans.bytes_out
            found["seal_mismatches_total"] += self._fetcher.seal_mismatches
        return found

    # Threads.

    def _post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Does it in the event loop, after all that was posted before; here and now, if this is it."""
        self._posted.append((function, arguments))
        if threading.get_ident() == self._thread:
            self._serve()
        else:
            self._later(self._serve)

    def _serve(self) -> None:
        while self._posted:
            function, arguments = self._posted.popleft()
            function(*arguments)

    def _later(self, function: Callable[..., object], *arguments: Any) -> None:
        """From any thread. Never at once: a session may deliver messages while an action is carried out."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def _tell(self, fact: events.Event) -> None:
        self._later(self._told, fact)

    def lost_bytes(self, names: Iterable[BlockName]) -> None:
        """These are in no tier. From any thread."""
        self._tell(events.BlocksLost(tuple(names)))

    # Cached blocks.

    @property
    def cache(self) -> NodeCache:
        """Nothing is decided about a cache that is not there."""
        assert self._cache is not None
        return self._cache

    def _fetch(self, order: events.Fetch) -> None:
        if self._fetcher is None:
            self._tell(events.BlocksFetched(order.key, order.start))
            return
        fetch = self._fetches[order.key] = Fetching(order, self.cache)
        fetch.hold()
        self._post(self._spawn, self._run_fetch(fetch, self._fetcher.begin(fetch)))

    async def _run_fetch(self, fetch: Fetching, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:  # no load that is decided when its end is known reads from it, and what is of use is adopted
            self._later(self._forget_fetch, fetch)

    def _forget_fetch(self, fetch: Fetching) -> None:
        del self._fetches[fetch.key]
        fetch.release()

    def _adopt(self, adopt: events.AdoptBlocks) -> None:
        fetch, names = self._fetches.get(adopt.request), adopt.names
        if fetch is None or not fetch.hold():
            self.lost_bytes(names)
            return

        def done(lost: Sequence[BlockName]) -> None:
            fetch.release()
            if lost:
                self.lost_bytes(lost)

        self.cache.adopt(names, fetch.adopt, done)

    def _end_fetch(self, key: RequestId) -> None:
        if self._fetcher is not None:
            self._fetcher.cancel(key)

    # Sessions with other nodes.

    def _release_sessions(self, key: RequestId) -> None:
        self._end_fetch(key)

    @property
    def fetcher(self) -> Fetcher:
        """Raises ProtocolError on a node without a cache: nobody there can have asked for blocks."""
        if self._fetcher is None:
            raise ProtocolError("blocks came to a node without a cache")
        return self._fetcher

    def on_peer(self, session: Session, peer: NodeId, message: messages.PeerMessage) -> None:
        """Over a session with `peer`. Raises ProtocolError."""
        kind = type(message)
        if kind in LETTERS:
            self._tell(events.LetterReceived(peer, cast(Letter, message)))
        elif kind in self._takers:
            self._takers[kind].receive(session, message)
        elif kind in self._heard:
            self._heard[kind](session, peer, message)
        else:
            raise ProtocolError(f"a {kind.__name__} for a node without such an engine")

    def place(self, session: Session, message: messages.PeerMessage, size: int) -> Sequence[memoryview]:
        taker = self._takers.get(type(message), super())
        placed: Sequence[memoryview] = taker.place(session, message, size)
        return placed

    def on_void(self, session: Session, message: messages.PeerMessage) -> None:
        if type(message) in self._takers:
            self._takers[type(message)].void(session, message)

    def gone(self, node: NodeId, reason: str) -> None:
        """A session ended, or could not begin, and what was under way over it ended with it."""
        self._loans.lost(node)
        self._tell(events.Gone(node, reason))


class KVMover(BlockMover):
    """Moves the KV of attempts too: to the engine's memory and from it, to where they decode, to nodes that hold it.

    `attends`: to KV in `memory`, for other nodes. `first_layer`: of the model, that is the first in `memory`.
    `received`: hears of the first token that came with a hand-over, just before `tell` hears that. `answer_s`: how long
    a holder may be silent."""

    cache: EngineCache

    def __init__(
        self,
        *,
        memory: KVBytes,
        attends: Attends,
        first_layer: int,
        answer_s: float,
        received: Callable[[RequestId, int], None],
        **others: Any,
    ) -> None:
        super().__init__(**others)
        peers = self._peers
        self._sender = HandoverSender(memory, first_layer, peers.get, self._spawn)
        self._receiver = HandoverReceiver(memory, peers.node_of, self._tell, partial(self._later, received))
        self.holders = HolderLines(peers, self._spawn, answer_s)
        self.shipments = Shipments(memory, peers, self._tell)
        self.hosts = HostedKV(memory, peers.node_of, attends, self._tell, self.shipments)
        self._loads: dict[RequestId, Loading] = {}
        self._read: dict[RequestId, Sequence[BlockName]] = {}  # ahead of a load
        self._staged: dict[RequestId, list[BlockStaging]] = {}
        self._handlers |= {
            events.LoadBlocks: self._load,
            events.Read: self._read_ahead,
            events.SaveBlocks: self._save,
            events.Shorten: self._shorten,
            events.ReleaseResources: self._release,
            events.OfferHandover: lambda action: self._post(self._sender.offer, action),
            events.SendHandover: lambda action: self.send(action.key, computed=action.computed),
            events.FinishHandover: lambda action: self._post(self._sender.on, action.key, Outgoing.computed),
            events.ReceiveHandover: lambda action: self._post(self._receiver.expect, action),
            events.Ship: lambda action: self._post(self.shipments.ship, action),
            events.OpenLine: lambda action: self._post(self.holders.open_line, action.peer),
            events.Reclaim: lambda action: self._post(self.shipments.reclaim, action),
            events.Host: lambda action: self._post(self.hosts.host, action),
            events.Rekey: lambda action: self._post(self.hosts.rekey, action),
            events.Trim: lambda action: self._post(self.hosts.trim, action),
            events.Unhost: lambda action: self._post(self.hosts.unhost, action),
            Preempted: lambda action: self._let_go(action.request),
        }
        self._heard[messages.HandoverSent] = lambda session, _, sent: self._receiver.sent(session, sent)
        self._takers |= {
            messages.HandoverSlices: self._receiver,
            messages.ShipmentSlices: self.hosts,
        }

    def gauges(self) -> dict[str, float]:
        found = super().gauges()
        found["seal_mismatches_total"] += self._receiver.seal_mismatches
        found["seal_mismatches_total"] += self.hosts.seal_mismatches + self.shipments.seal_mismatches
        return found | {
            "kv_bytes_in_total": self._receiver.bytes_in,
            "kv_bytes_out_total": self._sender.bytes_out,
            "kv_bytes_shipped_total": self.shipments.bytes_out,
            "kv_bytes_stowed_total": self.hosts.bytes_in,
            "kv_bytes_returned_total": self.shipments.bytes_in,
            "attention_asked_total": self.holders.num_asked,
            "attention_bytes_asked_total": self.holders.bytes_asked,
            "attention_bytes_answered_total": self.holders.bytes_answered,
            "attention_answered_total": self.hosts.num_attended,
        }

    # Cached blocks: to the engine and from it.

    def _load(self, load: events.LoadBlocks) -> None:
        key = load.key
        fetch = self._fetches.get(key)
        # It may be for more than is of use: what lies there is not this prefix and its state.
        is_of_use = fetch is not None and load.arriving and load.names == fetch.names[: len(load.names)]
        if fetch is not None and not (is_of_use and fetch.hold()):
            fetch = None
        begun = self._loads[key] = self.cache.load(load.names, load.blocks, fetch)
        read = self._read.pop(key, ())

        def ended(_: object) -> None:
            """In any thread."""
            self.cache.unread(read)
            with contextlib.suppress(KeyError):  # it is cancelled just now
                if load.told and self._loads[key] is begun:
                    del self._loads[key]
                    self._tell(events.Loaded(key, begun.num_blocks))

        if read or load.told:
            begun.task.add_done_callback(ended)

    def _read_ahead(self, read: events.Read) -> None:
        self._read[read.key] = read.names
        self.cache.read(read.names)

    def _shorten(self, shorten: events.Shorten) -> None:
        if not shorten.num_tokens:
            self._cancel_load(shorten.key)

    def load_of(self, key: RequestId) -> Loading | None:
        """What a run with it must wait for."""
        return self._loads.get(key)

    def is_loading(self, blocks: Set[int]) -> bool:
        """Whether any of these blocks of the engine is still being written."""
        loads = [load for load in list(self._loads.values()) if not load.over.is_set()]
        return any(not blocks.isdisjoint(load.blocks) for load in loads)

    def loaded(self, key: RequestId) -> None:
        """A run with it is computed."""
        self._loads.pop(key, None)

    def _cancel_load(self, key: RequestId) -> None:
        load = self._loads.pop(key, None)
        if load is not None:
            load.cancel()

    def stage(self, key: RequestId, names: Sequence[BlockName], blocks: Sequence[int]) -> BlockStaging | None:
        """Room in the store for those of these blocks that it does not have and a run will complete: for `save_layer`,
        until a `SaveBlocks` takes them over."""
        new = [at for at, name in enumerate(names) if not self.cache.store.contains(name)]
        if not new:
            return None
        staging = self.cache.stage([names[at] for at in new], [blocks[at] for at in new])
        self._staged.setdefault(key, []).append(staging)
        return staging

    def save_layer(self, staging: BlockStaging, layer: int) -> None:
        """This layer of them is computed."""
        self.cache.save_layer(staging, layer)

    def _save(self, save: events.SaveBlocks) -> None:
        def done(lost: Sequence[BlockName]) -> None:
            self._tell(Saved(save.request))
            if lost:
                self.lost_bytes(lost)

        heads = (save.head, *save.names[:-1])
        self.cache.save(save.names, heads, save.blocks, save.num_sunk, self._staged.pop(save.request, ()), done)

    def _let_go(self, key: RequestId) -> None:
        self._cancel_load(key)
        for staging in self._staged.pop(key, ()):
            self.cache.unstage(staging)

    def _release(self, release: events.ReleaseResources) -> None:
        key = release.key
        self._let_go(key)
        if key in self._read:
            self.cache.unread(self._read.pop(key))
        self._post(self._release_sessions, key)

    # Sessions with other nodes.

    def _release_sessions(self, key: RequestId) -> None:
        super()._release_sessions(key)
        self._sender.release(key)
        self._receiver.release(key)
        self.shipments.release(key)

    def kv_ready(self, key: RequestId, layers: Span, tokens: Span, blocks: Sequence[int]) -> None:
        """KV of an attempt is in place for these layers of `memory` and token positions. From any thread."""
        self._post(self._sender.on, key, Outgoing.ready, layers, tokens, blocks)

    def send(self, key: RequestId, *, computed: bool = False) -> None:
        """What was offered goes as it is computed. From any thread."""
        self._post(partial(self._sender.send, computed=computed), key)

    def first_token(self, key: RequestId, token: int) -> None:
        """It goes with the KV. From any thread, before `FinishHandover`."""
        self._post(self._sender.on, key, Outgoing.first_token, token)

    def gone(self, node: NodeId, reason: str) -> None:
        self.holders.lost(node)
        super().gone(node, reason)
