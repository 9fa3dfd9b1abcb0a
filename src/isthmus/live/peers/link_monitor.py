"""Measures traffic from one node to linked clusters, keeps a session with each cluster open, and ends sessions that
stand still.

A link that loses everything reports nothing. Therefore every session is asked for a sign of life again and again; a
session that gives none and makes no progress is ended long before TCP would end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from isthmus.core.conductor import LinkState
from isthmus.core.types import NS_PER_S, NodeId
from isthmus.live.messenger import RunningClock, Session
from isthmus.live.peers.messages import Neighbours, Probe
from isthmus.live.peers.sessions import Peers, Spawn

log = logging.getLogger(__name__)

LOOK_S = 0.02
KEEP_S = 0.5
"""Time between two probes of a session, or attempts to open one where there is none."""
TALK_BYTES = 64 << 10
"""Up to so many bytes in flight are messages, not KV: they do not make a link busy."""


class _Watched:
    """A session with a node of a linked cluster, and its progress. `arrived`, `waiting`: bytes; `moved_s`: time of
    the last progress."""

    def __init__(self, session: Session, now_s: float) -> None:
        self.session = session
        self.arrived = self.retransmits = self.waiting = 0
        self.moved_s = now_s
        self.rtt_s = 0.0
        self._asked_s: float | None = None
        self._seen: tuple[int, ...] = ()

    def look(self, now_s: float) -> None:
        """Updates the progress. Bytes count as moving when this machine's kernel takes them: on a slow link much time
        passes until the next acknowledgement."""
        if self.session.closed:  # what was on its way when it ended did not arrive
            self.waiting, self.moved_s = 0, now_s
            return
        stat = self.session.stat()
        self.arrived, self.retransmits = stat.bytes_out - stat.unacked_bytes, stat.retransmits
        self.waiting = stat.queued_bytes + stat.unacked_bytes
        unwritten = sum([lane.unwritten_bytes for lane in self.session.lanes])
        seen = (self.arrived, self.waiting, unwritten)
        if self._asked_s is None or seen != self._seen or self.session.suspended:
            self._seen, self.moved_s = seen, now_s

    def ask(self) -> None:
        """Sends a probe, unless one is unanswered."""
        if self._asked_s is not None or self.session.closed:
            return
        loop = asyncio.get_running_loop()
        asked_s = self._asked_s = loop.time()

        def answered(arrived: bool) -> None:
            self._asked_s = None
            if arrived:
                self.rtt_s = loop.time() - asked_s

        self.session.send(Probe(), done=answered)


class _Far:
    """A linked cluster."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.addresses: dict[NodeId, str] = {}
        self.watched: dict[Session, _Watched] = {}
        self.sent_bytes = self.retransmits = 0  # of sessions that ended
        self.busy_s = 0.0
        self.reaching = self.failed = False
        self.turn = 0

    @property
    def has_session(self) -> bool:
        """Whether a session is open. One that lost its connections counts while they may come back
        (`network.resume_s`)."""
        return any(not session.closed for session in self.watched)

    def watch(self, session: Session, now_s: float) -> None:
        if session not in self.watched:
            self.watched[session] = _Watched(session, now_s)
            self.failed = False

    def look(self, now_s: float, past_s: float, link_s: float) -> None:
        waiting = 0
        for watched in list(self.watched.values()):
            watched.look(now_s)
            if watched.session.ended:
                del self.watched[watched.session]
                self.sent_bytes += watched.arrived
                self.retransmits += watched.retransmits
                self.failed = not self.has_session
                continue
            waiting += watched.waiting
            if now_s - watched.moved_s > link_s:
                log.warning("the link to %s stands still: ending the session", self.name)
                watched.session.abort(f"nothing crossed the link to {self.name} for {link_s:g} s")
        if waiting > TALK_BYTES:
            self.busy_s += past_s

    def report(self) -> LinkState:
        watched = self.watched.values()
        return LinkState(
            source="",
            target=self.name,
            up=not self.addresses or not self.failed or self.has_session,  # as long as nothing says otherwise
            sent_bytes=self.sent_bytes + sum([each.arrived for each in watched]),
            busy_ns=int(self.busy_s * NS_PER_S),
            queued_bytes=sum([each.waiting for each in watched]),
            retransmits=self.retransmits + sum([each.retransmits for each in watched]),
            rtt_ns=int(min([each.rtt_s for each in watched if each.rtt_s], default=0) * NS_PER_S),
        )


class LinkMonitor:
    """Watches a node's links, in its event loop. `link_s`: how long a session may stand still with bytes in flight;
    None: nothing is watched, and every link counts as up. `spawn` owns the tasks."""

    def __init__(self, peers: Peers, link_s: float | None, spawn: Spawn) -> None:
        self._peers, self._link_s, self._spawn = peers, link_s, spawn
        self._far: dict[str, _Far] = {}
        self._is_watching = False
        self._running: RunningClock | None = None

    def linked(self, message: Neighbours) -> None:
        far = self._far.setdefault(message.cluster, _Far(message.cluster))
        far.addresses = message.addresses
        if self._link_s is not None and not self._is_watching:
            self._is_watching = True
            self._spawn(self._watch(self._link_s))

    def introduced(self, session: Session, node: NodeId) -> None:
        """Watches a session that another node opened."""
        for far in self._far.values():
            if node in far.addresses:
                far.watch(session, self._now_s())

    def _now_s(self) -> float:
        """Returns the time for which this process ran and watched."""
        if self._running is None:
            return asyncio.get_running_loop().time()
        return self._running.now_ns() / NS_PER_S

    def report(self) -> Sequence[LinkState]:
        if self._link_s is None:
            return [LinkState("", far.name, bool(far.addresses)) for far in self._far.values()]
        return [far.report() for far in self._far.values()]

    async def _watch(self, link_s: float) -> None:
        loop = asyncio.get_running_loop()
        running = self._running = RunningClock(
            lambda: round(loop.time() * NS_PER_S), round(min(1.0, link_s / 2) * NS_PER_S)
        )
        looked_s = kept_s = self._now_s()
        while True:
            if running.tick():
                await asyncio.sleep(LOOK_S)
                continue
            now_s = self._now_s()
            for far in list(self._far.values()):
                for node in far.addresses:
                    session = self._peers.open_to(node)
                    if session is not None:
                        far.watch(session, now_s)
                far.look(now_s, now_s - looked_s, link_s)
                if now_s - kept_s >= KEEP_S or not far.watched:
                    self._keep(far)
            looked_s = now_s
            if now_s - kept_s >= KEEP_S:
                kept_s = now_s
            await asyncio.sleep(LOOK_S)

    def _keep(self, far: _Far) -> None:
        """Probes every session, or opens one."""
        for watched in far.watched.values():
            watched.ask()
        if far.addresses and not far.has_session and not far.reaching:
            far.reaching = True
            self._spawn(self._reach(far))

    async def _reach(self, far: _Far) -> None:
        """Opens a session with the next node of the cluster, in turn."""
        nodes = list(far.addresses)
        far.turn += 1
        try:
            await self._peers.get(nodes[far.turn % len(nodes)])
        except (OSError, TimeoutError) as error:
            log.debug("the link to %s: %s", far.name, error)
            far.failed = True
            await asyncio.sleep(KEEP_S)
        finally:
            far.reaching = False
