"""Whoever reaches the ports of head and nodes without the cluster's token: it gets nothing, and takes nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isthmus.live.engine.emulated import expected_tokens
from isthmus.live.messenger import Terms
from isthmus.live.messenger.frames import PREFIX_BYTES, FrameKind, parse_prefix, prefix_of
from isthmus.live.messenger.greeting import NONCE_BYTES, Dialling, hello
from tests.live.cluster.kit import RECIPE, STEADY
from tests.served import LIMIT_S, serve

GREETINGS, NUM_STRANGERS = 8, 90


def received(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = client.recv(size - len(data))
        if not more:
            raise ConnectionError("it ended")
        data += more
    return data


def silent(client: socket.socket) -> None:
    """Not a byte."""


def noise(client: socket.socket) -> None:
    client.sendall(os.urandom(1 << 16))


def http(client: socket.socket) -> None:
    client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: isthmus\r\n\r\n")


def endless(client: socket.socket) -> None:
    client.sendall(prefix_of(FrameKind.HELLO, bytes(16 << 20)) + bytes(1 << 20))


def guessing(client: socket.socket) -> None:
    """A right greeting with a wrong token, and messages as if it had been right: 30 of them, from number 1 on."""
    dialling = Dialling(hello(os.urandom(16), 0, Terms(), bytes(NONCE_BYTES), first=True), b"guessed")
    client.sendall(dialling.begin())
    prefix = parse_prefix(memoryview(received(client, PREFIX_BYTES)))
    client.sendall(dialling.answer(prefix, received(client, prefix.header)))
    header = bytes(4_928_307)
    for seq in range(1, 31):
        client.sendall(prefix_of(FrameKind.DATA, header, seq=seq) + header)


def memory(pid: int) -> int:
    """Resident, in bytes."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) << 10


def ports(pid: int) -> set[int]:
    """Those that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


STRANGERS = [silent, noise, http, endless, guessing]


def test_strangers_cost_a_cluster_nothing(tmp_path: Path) -> None:
    """All at once, each kind at the ports of head and nodes, which they keep open for as long as they can."""
    limits = {"greeting_s": 2.0, "greetings": GREETINGS}
    sections = {
        "roles": {"prefill": 1, "decode": 1},
        "engine": {"kind": "emulated", "cost": STEADY},
        "limits": limits,
    }
    prompt = [3 * at % 256 for at in range(100)]
    with serve(tmp_path, sections) as served:
        pids = [served.process.pid, *served.children().values()]
        own = int(served.url.rpartition(":")[2])
        doors = [port for pid in pids for port in ports(pid) - {own}]
        assert len(doors) == 3
        served.tokens(prompt, 20)
        before = [memory(pid) for pid in pids]

        def stranger(number: int) -> bool:
            """Whether it was shown the door."""
            with socket.create_connection(("127.0.0.1", doors[number % 3]), timeout=LIMIT_S) as client:
                with contextlib.suppress(ConnectionError):
                    STRANGERS[number % len(STRANGERS)](client)
                with contextlib.suppress(ConnectionError):
                    while client.recv(1 << 16):
                        pass
            return True

        with ThreadPoolExecutor(NUM_STRANGERS) as pool:
            gone = [pool.submit(stranger, number) for number in range(NUM_STRANGERS)]
            assert served.tokens(prompt, 20) == expected_tokens(RECIPE, prompt, 20, stop_tokens=(257,))
            assert all(one.result(LIMIT_S) for one in gone)
        assert [served.process.pid, *served.children().values()] == pids
        assert all(memory(pid) - old < 8 << 20 for pid, old in zip(pids, before, strict=True))
        refused = served.gauge("connections_refused_total")
        assert set(refused) == {"head", "prefill-0", "decode-0"} and sum(refused.values()) >= NUM_STRANGERS
        said = [line for line in served.log.read_text().splitlines() if "a connection from" in line]
        assert 3 <= len(said) <= 3 * 30
