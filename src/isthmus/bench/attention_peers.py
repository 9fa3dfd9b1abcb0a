"""Holders that `isthmus bench attention` asks: processes that answer over sessions, as nodes do, or over bare sockets.

Every holder has the KV of all cases, in memory of the same layout as this process. Live holders get it as nodes do:
shipped over sessions, with seals.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
import torch

from isthmus.bench import BenchError
from isthmus.bench.child import Child, Loop, Pipe
from isthmus.bench.transfer_peers import linked, receive_into
from isthmus.core.blocks import KVLayout
from isthmus.core.node import events
from isthmus.core.node.letters import ReserveReply, ReserveRequest, ShipmentConfirmed, Shrink
from isthmus.core.types import NodeId, RequestId, Span
from isthmus.live.engine import kernels
from isthmus.live.engine.interface import Asking, Elsewhere, HolderQueries
from isthmus.live.engine.kv import KVMemory
from isthmus.live.engine.remote import AttentionShape, answer_to, queries_of
from isthmus.live.kv.mover import KVMover
from isthmus.live.messenger import Session, TcpNetwork
from isthmus.live.peers import messages
from isthmus.live.peers.sessions import Peers

CPU = torch.device("cpu")
LIMIT_S = 60.0
SWITCH_S = 0.0002
"""As in a node: the thread that computes gives the interpreter up for an instant at a time."""
HOME = NodeId("home")


class Memory:
    """KV of the layout's layers, and attention over it."""

    def __init__(self, layout: KVLayout, num_blocks: int, num_heads: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.layout, self.kernels = layout, kernels.select(CPU)
        self.kv = KVMemory(layout, num_blocks, CPU, self.kernels)
        self.shape = AttentionShape(num_heads, layout.head_dim, 0, layout.head_dim**-0.5)

    def attend(self, layer: int, asked: Sequence[HolderQueries], q: memoryview, parts: int = 1) -> memoryview:
        assert parts == 1, "holders here have all heads"
        with torch.inference_mode():
            queries, kv = queries_of(q, self.shape, asked), self.kv.layers[layer]
            return answer_to(asked, queries, kv, self.layout.block_size, self.shape, self.kernels)


class _Node:
    """The sessions and the mover of a node, in the event loop of the thread that makes it. `tell` hears facts in place
    of a node that decides."""

    def __init__(
        self, name: NodeId, memory: Memory, addresses: dict[NodeId, str], tell: Callable[[Any], None]
    ) -> None:
        self.network, self._tasks = TcpNetwork(), set[asyncio.Task[None]]()
        hello = messages.PeerHello(messages.PROTOCOL, name, "", memory.layout)
        self.peers = Peers(self.network, hello, lambda: self, addresses.__getitem__, self._gone)
        self.mover = KVMover(
            memory=memory.kv,
            attends=memory.attend,
            first_layer=0,
            cache=None,
            peers=self.peers,
            tell=tell,
            spawn=self._spawn,
            shares_memory=False,
            answer_s=LIMIT_S,
            received=lambda key, token: None,
        )
        self.mover.open(asyncio.get_running_loop())

    def _gone(self, node: NodeId, reason: str) -> None:
        self.mover.gone(node, reason)

    def on_message(self, session: Session, message: Any) -> None:
        peer = self.peers.node_of(session)
        if isinstance(message, messages.PeerHello):
            self.peers.entered(session, message)
            session.answer_lines(self.mover.hosts.answer)
        elif peer is not None:
            self.mover.on_peer(session, peer, message)

    def place(self, session: Session, message: Any, size: int) -> Sequence[memoryview]:
        return self.mover.place(session, message, size)

    def on_void(self, session: Session, message: Any) -> None:
        self.mover.on_void(session, message)

    def on_close(self, session: Session, reason: str) -> None:
        self.peers.ended(session, reason)

    async def end_sessions(self, nodes: Iterable[NodeId]) -> None:
        sessions = [self.peers.open_to(node) for node in nodes]
        for session in sessions:
            if session is not None:
                session.abort("the benchmark is over")
        while any(session is not None and not session.ended for session in sessions):
            await asyncio.sleep(0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _hold(pipe: Pipe, layout: dict[str, Any], num_blocks: int, num_heads: int, threads: int) -> None:
    """Process of a holder. Requests get consecutive blocks; the first blocks are free again when all have left."""
    sys.setswitchinterval(SWITCH_S)
    memory = Memory(msgspec.convert(layout, KVLayout), num_blocks, num_heads, threads)

    async def listen() -> Any:
        given: dict[RequestId, int] = {}

        def tell(fact: Any) -> None:
            match fact:
                case events.LetterReceived(peer, ReserveRequest(key, num_blocks, share)):
                    first = sum(given.values())
                    given[key] = num_blocks
                    do(events.Host(key, peer, share, tuple(range(first, first + num_blocks))))
                    do(events.SendLetter(peer, ReserveReply(key, True)))
                case events.LetterReceived(_, Shrink(key, 0)):
                    do(events.Unhost(key))
                    del given[key]
                case events.ShipmentStored(key, peer, stop, damaged):
                    do(events.SendLetter(peer, ShipmentConfirmed(key, stop, damaged)))

        node = _Node(NodeId("holder"), memory, {}, tell)
        do = node.mover.do
        return await node.network.listen("127.0.0.1", 0, messages.PeerMessage, lambda: node)

    _server, port = Loop().run(listen())
    pipe.send(port)
    with contextlib.suppress(EOFError):
        pipe.recv()


class Live:
    """Holders as nodes are: sessions, event loops, a thread for attention. `elsewhere` asks them."""

    def __init__(self, memory: Memory, num_holders: int, num_heads: int, threads: int) -> None:
        self._memory, self._facts = memory, queue.SimpleQueue[Any]()
        arguments = msgspec.to_builtins(memory.layout), memory.kv.num_blocks, num_heads, threads
        self._children = [Child(_hold, *arguments) for _ in range(num_holders)]
        self._addresses = {
            NodeId(f"holder-{at}"): f"127.0.0.1:{child.hello}" for at, child in enumerate(self._children)
        }
        self._loop = Loop(LIMIT_S)
        self._node = self._loop.run(self._start())
        self._keys: list[RequestId] = []

    async def _start(self) -> _Node:
        return _Node(HOME, self._memory, self._addresses, self._facts.put)

    def place(self, parts: Sequence[Sequence[Span]]) -> None:
        """Ships blocks of this memory: of each row, a span for each holder. What was there before goes."""
        self._vacate()
        self._keys = [RequestId(f"row-{row}") for row in range(len(parts))]
        for key, spans in zip(self._keys, parts, strict=True):
            for holder, span in zip(self._addresses, spans, strict=True):
                blocks = tuple(range(span.start, span.stop))
                self._do(events.SendLetter(holder, ReserveRequest(key, len(blocks))))
                self._wait_for(events.LetterReceived(holder, ReserveReply(key, True)))
                self._do(events.OpenLine(holder))
                self._do(events.Ship(key, holder, 0, blocks))
                self._wait_for(events.LetterReceived(holder, ShipmentConfirmed(key, len(blocks))))

    def _vacate(self) -> None:
        for key in self._keys:
            for holder in self._addresses:
                self._do(events.SendLetter(holder, Shrink(key, 0)))

    def elsewhere(self) -> Elsewhere:
        """Of one step."""
        return self._node.mover.holders.remote(self._keys)

    def payload_bytes(self) -> int:
        """Of queries and sums so far, without what goes around them."""
        gauges = self._node.mover.gauges()
        return int(gauges["attention_bytes_asked_total"] + gauges["attention_bytes_answered_total"])

    def wire_bytes(self) -> int:
        """All that went over the sessions so far, both ways."""
        return self._loop.run(self._count())

    async def _count(self) -> int:
        sessions = [self._node.peers.open_to(holder) for holder in self._addresses]
        stats = [each.stat() for each in sessions if each is not None]
        return sum([stat.bytes_in + stat.bytes_out for stat in stats])

    def _wait_for(self, expected: events.LetterReceived) -> None:
        """Raises BenchError when something else happens."""
        while True:
            try:
                fact = self._facts.get(timeout=LIMIT_S)
            except queue.Empty:
                raise BenchError(f"no {type(expected.letter).__name__} came in {LIMIT_S:g} s") from None
            if fact == expected:
                return
            is_progress = isinstance(fact, events.LetterReceived) and isinstance(fact.letter, ShipmentConfirmed)
            if not is_progress:
                raise BenchError(f"{fact} in place of {expected}")

    def _do(self, action: Any) -> None:
        self._loop.soon(self._node.mover.do, action)

    def close(self) -> None:
        self._loop.run(self._node.end_sessions(self._addresses))
        self._loop.close()
        for child in self._children:
            child.close()


_HEAD = struct.Struct("<cIIIQ")
"""What to do; then layer, first slot or number of rows, tokens of a row, bytes that follow."""
STORE, ATTEND, ECHO = b"s", b"a", b"e"


def _serve_bare(pipe: Pipe, layout: dict[str, Any], num_blocks: int, num_heads: int, threads: int) -> None:
    memory = Memory(msgspec.convert(layout, KVLayout), num_blocks, num_heads, threads)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        link, _ = server.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head, room, size = memoryview(bytearray(_HEAD.size)), bytearray(), memory.layout.block_size
    with contextlib.suppress(BenchError):  # the parent is done
        while True:
            receive_into(link, head)
            what, layer, count, num_tokens, num_bytes = _HEAD.unpack(head)
            if what == STORE:
                receive_into(link, memory.kv.landing(layer, count, count + num_tokens))
                continue
            if len(room) != num_bytes:
                room = bytearray(num_bytes)
            receive_into(link, memoryview(room))
            if what == ECHO:
                link.sendall(bytes(num_bytes + num_bytes // memory.layout.head_dim))
                continue
            each = -(-num_tokens // size)
            asked = [
                HolderQueries(range(row * each, (row + 1) * each), 1, num_tokens, num_tokens, 0)
                for row in range(count)
            ]
            link.sendall(memory.attend(layer, asked, memoryview(room)))


class Bare:
    """The same attention behind blocking sockets, one thread on either side: only the bytes are sent and nothing is
    checked. A lower bound for any protocol."""

    def __init__(self, memory: Memory, num_holders: int, num_heads: int, threads: int) -> None:
        self._memory = memory
        arguments = msgspec.to_builtins(memory.layout), memory.kv.num_blocks, num_heads, threads
        self._children = [Child(_serve_bare, *arguments) for _ in range(num_holders)]
        self._links = {f"holder-{at}": linked(child.hello) for at, child in enumerate(self._children)}

    def place(self, parts: Sequence[Sequence[Span]]) -> None:
        """See `Live`."""
        size = self._memory.layout.block_size
        for at, link in enumerate(self._links.values()):
            first = 0
            for spans in parts:
                span = spans[at]
                for layer in range(self._memory.layout.num_layers):
                    data = self._memory.kv.export(layer, span.start * size, span.stop * size)
                    link.sendall(_HEAD.pack(STORE, layer, first * size, len(span) * size, len(data)))
                    link.sendall(data)
                first += len(span)

    def elsewhere(self, what: bytes = ATTEND) -> Elsewhere:
        """`what`: ATTEND, or ECHO for an answer of zeros without attention."""
        return _BareQuestions(self._links, what, self._memory.layout.head_dim)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        for child in self._children:
            child.close()


class _BareQuestions:
    """`Elsewhere` over blocking sockets."""

    def __init__(self, links: dict[str, socket.socket], what: bytes, head_dim: int) -> None:
        self._links, self._what, self._head_dim = links, what, head_dim
        self._sizes: dict[str, int] = {}

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        self._sizes[asking.holder] = q.nbytes
        head = _HEAD.pack(self._what, layer, asking.num_rows, asking.chunks[0][2], q.nbytes)
        self._links[asking.holder].sendall(b"".join((head, q)))

    def answer(self, layer: int, asking: Asking) -> memoryview:
        size = self._sizes[asking.holder]
        data = memoryview(bytearray(size + size // self._head_dim))
        receive_into(self._links[asking.holder], data)
        return data
