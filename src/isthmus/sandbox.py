"""Processes that may die: native code of libraries handles untrusted input here, within limits of memory, CPU time and
stack.

    this process ──fork──> fork server, which has loaded what workers need
         │                      │ fork
         └──questions───────> worker ──answers──> …   (a worker that dies, or has grown, is replaced by a fresh one)

A fork server runs the function `main` of a module, which calls `serve`. It has one thread and answers no questions, so
that a fork takes milliseconds and starts with clean state. The kernel limits CPU time, since no Python code runs while
a library does not return.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import msgspec

from isthmus.config import child_environment
from isthmus.core.errors import IsthmusError, StartError

Answer = Callable[[bytes], Sequence[bytes | memoryview]]
"""Answers a question, in pieces."""
Question = bytes | Callable[[], bytes]
"""Bytes, or a function that makes them for each worker that is asked."""
NOWHERE = memoryview(b"")
_STACK_BYTES = 256 << 20
"""Clients may nest grammar rules deeply, and libraries recurse into them: 8 KiB of stack for each level."""
_WALL_FACTOR, _LEAST_WALL_S, _START_S = 5, 10.0, 60.0
"""Wall time allowed for a question, a multiple of its CPU time and a minimum, and for the start of a fork server."""
_TRIES = 3
_FEW_THREADS = {"MALLOC_ARENA_MAX": "2", "RAYON_NUM_THREADS": "1"}
"""Environment that limits library threads, each of which reserves address space."""
_MAX_ORDER = 1024
_BURY_S = 5.0
"""How often a fork server reaps workers that ended."""
_FRAME = struct.Struct("<BI")
_ANSWER, _LAST, _NOTE, _TROUBLE = range(4)
"""Kinds of frames from a child. LAST: an answer, after which the worker exits; NOTE: what is worked on, the first one
when a question is taken up; TROUBLE: why there is no answer, in a worker a traceback."""
_encode = msgspec.msgpack.Encoder().encode


class SandboxError(IsthmusError):
    """A worker died over a question. `note`: the text of its last `note`."""

    def __init__(self, note: str) -> None:
        super().__init__(f"the process that worked on {note or 'it'} died")
        self.note = note


class Limits(msgspec.Struct, frozen=True):
    """Limits of a worker."""

    memory_bytes: int  # beyond its memory at the start
    cpu_s: float  # of one question
    kept_bytes: int = 0  # a worker that has grown by more exits after its answer; 0: never
    idle_s: float = 0.0  # a worker that gets no question for so long exits; 0: never
    nice: int = 0


class ForkServer:
    """A process that forks workers. Starts with the first `fork`, and again after it ended. Thread-safe."""

    def __init__(self, module: str, setup: bytes) -> None:
        """`setup`: input of the module's `load`."""
        self._module, self._setup = module, setup
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._leave: Callable[[], object] = lambda: None

    def fork(self, limits: Limits) -> socket.socket:
        """Returns the connection with a new worker. Blocks while the server starts. Raises StartError with the
        complaint of `load`, or when this process has no resources."""
        try:
            return self._fork(limits)
        except OSError as error:
            raise StartError(f"no process can be started: {error.strerror or error}") from None

    def _fork(self, limits: Limits) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                order = _encode(limits)
                try:
                    self._send(order, theirs)
                except OSError:  # it is not there any more
                    self._leave()
                    self._control = None
                    self._send(order, theirs)
        except BaseException:
            ours.close()
            raise
        ours.settimeout(max(_LEAST_WALL_S, _WALL_FACTOR * limits.cpu_s))
        return ours

    def _send(self, order: bytes, worker: socket.socket) -> None:
        if self._control is None:
            self._control = self._start()
        socket.send_fds(self._control, [order], [worker.fileno()])

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", f"from {self._module} import main; main()"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=child_environment(1) | _FEW_THREADS,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        self._leave = weakref.finalize(self, _end, process, ours)
        ours.settimeout(_START_S)
        try:
            _write(ours, _ANSWER, [self._setup])
            kind, said = _read(ours)
        except OSError:
            kind, said = _TROUBLE, bytearray(f"{self._module} died before it began".encode())
        if kind == _TROUBLE:
            self._leave()
            raise StartError(said.decode())
        return ours

    def close(self) -> None:
        """Ends the server. Workers exit when their connections are closed."""
        with self._lock:
            self._leave()
            self._control = None


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Kills a fork server, which has no state."""
    control.close()
    process.kill()
    process.wait()


class Sandbox:
    """One worker at a time. Not thread-safe."""

    def __init__(self, server: ForkServer, limits: Limits) -> None:
        self._server, self._limits = server, limits
        self._worker: socket.socket | None = None
        self._note: str | None = None
        """The worker's last note on the question; None: it has not taken the question up."""
        self.deaths = 0
        self.generation = 0
        """Number of workers so far: a new one does not remember earlier questions."""

    def open(self) -> None:
        """Starts a worker, if there is none. Raises StartError."""
        if self._worker is None:
            self._worker = self._server.fork(self._limits)
            self.generation += 1

    def ask(self, question: Question, into: memoryview = NOWHERE) -> bytearray:
        """Returns an answer; its last bytes fill `into` instead. Blocks. Raises SandboxError or StartError."""
        [found] = ask_all([(self, question, into)])
        if isinstance(found, IsthmusError):
            raise found
        return found

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _send(self, question: Question) -> bool:
        """Sends a question; returns False if the worker died."""
        if self._worker is not None and _has_said(self._worker):
            self.close()  # it was idle and exited
        self.open()
        assert self._worker is not None
        self._note = None
        try:
            _write(self._worker, _ANSWER, [question if isinstance(question, bytes) else question()])
        except OSError:
            self._bury()
            return False
        return True

    def _receive(self, into: memoryview) -> bytearray | None:
        """Receives an answer; returns None if the worker died."""
        assert self._worker is not None
        try:
            while True:
                kind, said = _read(self._worker, into)
                if kind != _NOTE:
                    break
                self._note = said.decode()
        except OSError:
            self._bury()
            return None
        if kind in (_LAST, _TROUBLE):
            self.close()
        if kind == _TROUBLE:
            raise AssertionError(said.decode())
        return said

    def _bury(self) -> None:
        self.deaths += 1
        self.close()


def ask_all(
    asked: Sequence[tuple[Sandbox, Question, memoryview]],
) -> list[bytearray | SandboxError | StartError]:
    """Asks each sandbox its question, in parallel; returns answers or errors, in order. A question is asked again if
    its worker died before taking it up, and so not because of it."""
    found: list[bytearray | SandboxError | StartError] = [SandboxError("")] * len(asked)
    left = list(range(len(asked)))
    for _ in range(_TRIES):
        sent = list[int]()
        for at in list(left):
            try:
                if asked[at][0]._send(asked[at][1]):
                    sent.append(at)
            except StartError as error:
                found[at] = error
                left.remove(at)
        for at in sent:
            answer = asked[at][0]._receive(asked[at][2])
            note = asked[at][0]._note
            found[at] = SandboxError(note or "") if answer is None else answer
            if answer is not None or note is not None:
                left.remove(at)
    return found


# In the child.

_connection: socket.socket | None = None
"""The connection of this worker; None in other processes."""
_first_bytes = 0
"""Memory of this worker at its start."""


def serve(load: Callable[[bytes], Answer], idle_s: float | None = None) -> NoReturn:
    """Runs a fork server: the main program of its module. `load` turns the set-up into a function that answers
    questions. Exits at the end of its input, or when it has no worker for `idle_s`."""
    control = socket.socket(fileno=0)
    try:
        answer = load(bytes(_read(control)[1]))
    except IsthmusError as error:
        _write(control, _TROUBLE, [str(error).encode()])
        os._exit(error.exit_code)
    gc.collect()
    gc.freeze()  # memory shared with workers stays shared
    _write(control, _ANSWER, [])
    control.settimeout(_BURY_S)
    workers = set[int]()
    since = time.monotonic()
    while True:
        descriptors = list[int]()
        with contextlib.suppress(TimeoutError):
            order, descriptors, _, _ = socket.recv_fds(control, _MAX_ORDER, 1)
            if not order:
                os._exit(0)
        workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]}
        if workers or descriptors:
            since = time.monotonic()
        if descriptors:
            workers.add(_fork(control, descriptors[0], msgspec.msgpack.decode(order, type=Limits), answer))
        elif idle_s is not None and time.monotonic() - since > idle_s:
            os._exit(0)


def note(text: str) -> None:
    """Reports what this worker works on, for the error if it dies. No effect outside of workers."""
    if _connection is not None:
        _write(_connection, _NOTE, [text.encode()])


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Limits CPU time inside further, in a worker; afterwards the question's own limit continues."""
    if _connection is None:
        yield
        return
    left, _ = signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, left)


def grown_bytes() -> int:
    """Returns by how much this worker's memory has grown."""
    return max(0, _resident_bytes() - _first_bytes)


def _fork(control: socket.socket, descriptor: int, limits: Limits, answer: Answer) -> int:
    pid = os.fork()
    if pid == 0:
        control.detach()
        _become_worker(socket.socket(fileno=descriptor), limits, answer)
    os.close(descriptor)
    return pid


def _become_worker(connection: socket.socket, limits: Limits, answer: Answer) -> NoReturn:
    global _connection, _first_bytes
    _connection, _first_bytes = connection, _resident_bytes()
    connection.settimeout(limits.idle_s or None)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 2)  # libraries' last messages: SandboxError tells more
    os.nice(limits.nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if pages := _memory_pages():
        most = pages[0] * resource.getpagesize() + _STACK_BYTES + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_work, args=(connection, limits, answer), daemon=True)
    thread.start()
    thread.join()
    os._exit(0)


def _work(connection: socket.socket, limits: Limits, answer: Answer) -> None:
    """Answers questions until the connection ends."""
    most_bytes = limits.kept_bytes or 1 << 62
    with contextlib.suppress(OSError, MemoryError):
        while True:
            asked = bytes(_read(connection)[1])
            _write(connection, _NOTE, [])
            signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
            kind, found = _answered(answer, asked)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(connection, _LAST if kind == _ANSWER and grown_bytes() > most_bytes else kind, found)


def _answered(answer: Answer, asked: bytes) -> tuple[int, Sequence[bytes | memoryview]]:
    """Returns kind and pieces of an answer, a traceback for a bug. Raises MemoryError."""
    try:
        return _ANSWER, answer(asked)
    except MemoryError:
        raise
    except Exception:
        return _TROUBLE, [traceback.format_exc().encode()]


def _resident_bytes() -> int:
    """Returns resident memory, without pages of files, which are shared."""
    pages = _memory_pages()
    return (pages[1] - pages[2]) * resource.getpagesize() if pages else 0


def _memory_pages() -> list[int]:
    """Returns numbers of pages: of address space, resident, and resident of files (Linux); empty if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return [int(word) for word in file.read().split()[:3]]
    except OSError:
        return []


def _has_said(connection: socket.socket) -> bool:
    """Whether a frame or the end of the connection has come."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


# Frames: kind and length, then so many bytes.


def _write(connection: socket.socket, kind: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Sends a frame. Raises OSError."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    for view in [memoryview(_FRAME.pack(kind, sum(map(len, views)))), *views]:
        connection.sendall(view)


def _read(connection: socket.socket, into: memoryview = NOWHERE) -> tuple[int, bytearray]:
    """Receives a frame: kind and content; an answer's last bytes fill `into` instead. Raises OSError."""
    head = bytearray(_FRAME.size)
    _fill(connection, memoryview(head))
    kind, length = _FRAME.unpack(head)
    rest = into if kind in (_ANSWER, _LAST) else NOWHERE
    if len(rest) > length:
        raise ConnectionError("an answer is too short")
    found = bytearray(length - len(rest))
    _fill(connection, memoryview(found))
    _fill(connection, rest)
    return kind, found


def _fill(connection: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if not count:
            raise ConnectionError("the other process is gone")
        at += count
