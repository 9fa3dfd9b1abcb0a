"""The connection to the adapter: one thread that connects, reads, and connects again after a loss.

Each connection has a number, its session: slots and loads of one session mean nothing in the next.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from isthmus.live.servers.wire import (
    Arena,
    Frames,
    FromWorker,
    Open,
    Refused,
    ToWorker,
    frame,
    receive_with_memory,
    send_with_memory,
)
from isthmus.live.store.arena import PeerArena
from isthmus_vllm.pages import Area

if TYPE_CHECKING:
    from isthmus_vllm.worker import Worker

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 5.0
SEND_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 18

log = logging.getLogger("vllm.isthmus")  # vLLM shows what is under its own name


class Link(threading.Thread):
    """Sends `hello` first on each connection, with `memory`, the descriptor of its arena, and calls `listener` from its
    thread: opened, received…, lost. When `received` raises ValueError, the connection is closed."""

    def __init__(self, path: str, hello: Open, memory: int, listener: Worker) -> None:
        super().__init__(name="isthmus-link", daemon=True)
        self._path = path
        self._hello, self._memory = hello, memory
        self._listener = listener
        self._lock = threading.Lock()  # over `_socket` and the sending of a whole frame
        self._socket: socket.socket | None = None
        self._session = 0
        self._stopped = threading.Event()
        self._refusal = ""

    def send(self, session: int, message: FromWorker) -> bool:
        """Returns False if the session is over; the message may or may not have arrived then."""
        with self._lock:
            if self._socket is None or session != self._session:
                return False
            try:
                self._socket.sendall(frame(message))
            except OSError as error:  # a time-out too: the adapter does not read
                log.warning("isthmus: sending to the adapter failed: %r", error)
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, which ends the session
                return False
            return True

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopped.is_set():
            if self._connect_and_read():
                pause = FIRST_PAUSE_S
            self._stopped.wait(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    def _connect_and_read(self) -> bool:
        """Serves one connection to its end; returns whether the adapter accepted it."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        is_open, memories = False, list[int]()
        try:
            stream.connect(self._path)
            seconds, part = int(SEND_TIMEOUT_S), int(SEND_TIMEOUT_S % 1 * 1e6)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, part))
            send_with_memory(stream, self._hello, self._memory)
            frames = Frames(ToWorker)
            data, memories = receive_with_memory(stream, _READ_BYTES)
            while data:
                for message in frames.feed(data):
                    if is_open:
                        self._listener.received(self._session, message)
                    elif not self._open(stream, message, memories):
                        return False
                    else:
                        is_open = True
                data = stream.recv(_READ_BYTES)
        except (ConnectionRefusedError, FileNotFoundError):
            pass  # not there yet, or not any more
        except (OSError, ValueError) as error:
            log.warning("isthmus: the connection to the adapter broke: %r", error)
        finally:
            with self._lock:
                self._socket = None
            stream.close()
            for memory in memories:
                os.close(memory)
            if is_open:
                log.warning("isthmus: the adapter is gone")
                self._listener.lost(self._session)
        return is_open

    def _open(self, stream: socket.socket, answer: ToWorker, memories: list[int]) -> bool:
        if isinstance(answer, Refused):
            # Logged once, though the link keeps dialling: the adapter's settings may change.
            if answer.reason != self._refusal:
                log.error(
                    "isthmus: the adapter refuses this server, nothing is loaded or saved: %s", answer.reason
                )
            self._refusal = answer.reason
            return False
        if not isinstance(answer, Arena):
            raise ValueError(f"{type(answer).__name__} instead of an answer to Open")
        ours, theirs = self._hello.memory, answer.memory
        if ours.shape != theirs.shape:
            raise ValueError(f"an arena of other blocks: {theirs}")
        arena = PeerArena.of(memories[0], theirs) if memories else None
        if arena is None:
            raise ValueError(f"an arena that cannot be mapped: {theirs}")
        with self._lock:
            self._session += 1
            self._socket = stream
        log.info("isthmus: connected to the adapter, %d slots", theirs.num_slots)
        self._listener.opened(self._session, Area(arena))
        return True
