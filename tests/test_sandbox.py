"""Processes that may die."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest

from isthmus.core.errors import StartError
from isthmus.sandbox import NOWHERE, ForkServer, Limits, Sandbox, SandboxError, ask_all
from tests.served import LIMIT_S, POLL_S

LIMITS = Limits(memory_bytes=64 << 20, cpu_s=0.3)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer("tests.sandboxed", b"setup")
    yield made
    made.close()


@pytest.fixture
def box(server: ForkServer) -> Iterator[Sandbox]:
    made = Sandbox(server, LIMITS)
    yield made
    made.close()


def test_a_worker_answers_and_keeps_its_state(box: Sandbox) -> None:
    assert box.ask(b"echo " + b"x" * 3_000_000) == b"<" + b"x" * 3_000_000 + b">"
    assert [box.ask(b"count") for _ in range(2)] == [b"3", b"4"], "the set-up and three questions"
    into = bytearray(4)
    assert box.ask(b"echo 12345", memoryview(into)) == b"<12" and into == b"345>"
    assert (box.deaths, box.generation) == (0, 1)


@pytest.mark.parametrize("question", [b"crash", b"spin", b"brief", b"take %d" % (100 << 20)])
def test_what_kills_a_worker_is_an_error_of_its_question_alone(box: Sandbox, question: bytes) -> None:
    pid = int(box.ask(b"pid"))
    with pytest.raises(SandboxError) as caught:
        box.ask(question)
    try:
        until_gone(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert caught.value.note == ("what crashes" if question == b"crash" else "")
    assert box.ask(b"count") == b"2", "the next worker knows nothing"
    assert (box.deaths, box.generation) == (1, 2)


def test_stacks_are_deep(box: Sandbox) -> None:
    assert box.ask(b"deep 20000") == b"20000"


def test_a_bug_of_ours_is_told_with_its_traceback(box: Sandbox) -> None:
    with pytest.raises(AssertionError, match="KeyError: 'a bug'"):
        box.ask(b"bug")
    assert box.ask(b"count") == b"2" and not box.deaths


def test_a_worker_that_has_grown_is_replaced(server: ForkServer) -> None:
    box = Sandbox(server, Limits(64 << 20, 1.0, kept_bytes=8 << 20))
    assert int(box.ask(b"take %d" % (1 << 20))) >= 1 << 20
    assert box.ask(b"count") == b"4"
    assert int(box.ask(b"take %d" % (20 << 20))) >= 20 << 20
    assert box.ask(b"count") == b"2" and not box.deaths
    box.close()


def test_a_worker_that_somebody_kills_before_it_takes_its_question_up_is_replaced(box: Sandbox) -> None:
    pid, asked = int(box.ask(b"pid")), threading.Event()
    os.kill(pid, signal.SIGSTOP)

    def question() -> bytes:
        asked.set()
        return b"pid" if box.generation == 1 else b"count"

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(box.ask, question)
        assert asked.wait(LIMIT_S)
        os.kill(pid, signal.SIGKILL)
        assert answer.result() == b"2"
    assert (box.deaths, box.generation) == (1, 2)


def test_some_are_asked_side_by_side(server: ForkServer) -> None:
    boxes = [Sandbox(server, LIMITS) for _ in range(4)]
    questions = [b"echo a", b"crash", b"echo b", b"count"]
    found = ask_all([(box, question, NOWHERE) for box, question in zip(boxes, questions, strict=True)])
    assert [found[0], found[2], found[3]] == [b"<a>", b"<b>", b"2"] and isinstance(found[1], SandboxError)
    for box in boxes:
        box.close()


def test_one_that_is_not_asked_leaves_and_that_is_no_death(server: ForkServer) -> None:
    box = Sandbox(server, Limits(64 << 20, 1.0, idle_s=0.05))
    pid = int(box.ask(b"pid"))
    until_gone(pid)
    assert box.ask(b"count") == b"2" and box.deaths == 0 and box.generation == 2
    box.close()


def test_a_fork_server_that_died_is_started_again() -> None:
    server = ForkServer("tests.sandboxed", b"setup")
    box = Sandbox(server, LIMITS)
    worker = int(box.ask(b"pid"))
    os.kill(parent_of(worker), signal.SIGKILL)
    assert box.ask(b"count") == b"3", "the worker is still there"
    os.kill(worker, signal.SIGKILL)
    assert box.ask(b"count") == b"2"
    box.close()
    server.close()


def test_where_nothing_can_be_started_others_are_answered(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    box.open()
    server = ForkServer("tests.sandboxed", b"setup")
    late = Sandbox(server, LIMITS)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", no_more)
        failed, answered = ask_all([(each, b"echo a", NOWHERE) for each in (late, box)])
    assert isinstance(failed, StartError) and "Too many open files" in str(failed)
    assert answered == b"<a>" and late.ask(b"count") == b"2" and late.deaths == 0
    late.close()
    server.close()


def test_what_it_cannot_load_is_said() -> None:
    refused, missing = (b"refuse", "tests.sandboxed", "no such model"), (b"", "tests.nothing", "died before")
    for setup, module, words in (refused, missing):
        with pytest.raises(StartError, match=words):
            Sandbox(ForkServer(module, setup), LIMITS).ask(b"count")


def test_a_worker_is_told_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ISTHMUS_TOKEN", "ISTHMUS_API_KEY"):
        monkeypatch.setenv(name, "secret")
    server = ForkServer("tests.sandboxed", b"setup")
    names = Sandbox(server, LIMITS).ask(b"environment").decode().split()
    assert "PATH" in names and not {"ISTHMUS_TOKEN", "ISTHMUS_API_KEY"}.intersection(names)
    server.close()


def test_workers_and_server_leave_when_nobody_holds_them() -> None:
    server = ForkServer("tests.sandboxed", b"setup")
    box = Sandbox(server, LIMITS)
    worker = int(box.ask(b"pid"))
    parent = parent_of(worker)
    del box
    until_gone(worker)
    del server
    until_gone(parent)


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def until_gone(pid: int) -> None:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(POLL_S)
    raise AssertionError(f"process {pid} is still there")
