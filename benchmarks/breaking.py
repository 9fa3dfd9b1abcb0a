"""Breaks a running cluster of vLLM nodes from outside: processes, connections, stored bytes. Linux, same user or root.

Finds processes by /proc alone and knows none of their messages. Touches only descendants of the head whose port was
named.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus.core.errors import StartError

PAGE = 4096
SYS_PIDFD_GETFD = 438
DAMAGED_SHARE = 0.25
"""Share of the pages in use that one fault damages, so that a load surely meets one."""
PARTS = ("adapter", "server", "core")
_LISTENING, _ESTABLISHED, _CONNECTED = "0A", "01", "03"
_NODE = re.compile(r"isthmus\0node\0--launched\0--name\0([^\0]+)")


def _read(path: Path | str) -> str:
    """Empty for what is gone."""
    try:
        return Path(path).read_bytes().decode("utf8", "replace")
    except OSError:
        return ""


@dataclass(frozen=True, order=True)
class Process:
    """`began`: start time in clock ticks, which tells apart processes that got the same number."""

    pid: int
    began: int

    @property
    def command(self) -> str:
        return _read(f"/proc/{self.pid}/cmdline")

    @property
    def lives(self) -> bool:
        return _began(self.pid)[1] == self.began

    def sockets(self) -> dict[str, int]:
        """File descriptors by inode."""
        found = {}
        with suppress(OSError):
            for each in Path(f"/proc/{self.pid}/fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(each)
                    if target.startswith("socket:["):
                        found[target[8:-1]] = int(each.name)
        return found


def _began(pid: int) -> tuple[int, int]:
    """Parent and start time; (0, 0) if the process is gone or a zombie."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[1]), int(fields[19])) if fields and fields[0] not in ("Z", "X") else (0, 0)


def _tree() -> dict[int, list[Process]]:
    """Children of each process."""
    found: dict[int, list[Process]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            parent, began = _began(int(each.name))
            if began:
                found.setdefault(parent, []).append(Process(int(each.name), began))
    return found


def _tcp() -> Iterator[tuple[str, str, str, str]]:
    """Of each TCP socket: its address, the other side's, its state and inode."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).splitlines()[1:]:
            fields = line.split()
            yield fields[1], fields[2], fields[3], fields[9]


class Cluster:
    """`port`: of its gateway, on this machine. `stall_s`: how long what is stopped stands still."""

    def __init__(self, port: int, stall_s: float = 2.0) -> None:
        self._stall_s = stall_s
        inode = next(
            (i for own, _, state, i in _tcp() if state == _LISTENING and own.endswith(f":{port:04X}")), ""
        )
        processes = [each for children in _tree().values() for each in children]
        heads = [each for each in processes if inode and inode in each.sockets()]
        if not heads:
            raise StartError(
                f"no process of this machine listens at port {port}, or not one that can be looked into"
            )
        self.head = min(heads, key=lambda each: each.began)
        self._seen: set[Process] = set()

    def descendants(self) -> set[Process]:
        """Descendants of the head now; `left_over` remembers them."""
        tree, found, left = _tree(), set[Process](), [self.head.pid]
        while left:
            children = tree.get(left.pop(), [])
            found.update(children)
            left += [each.pid for each in children]
        self._seen |= found
        return found

    def left_over(self) -> list[Process]:
        """Living processes that were descendants of the head once and are not any more."""
        return sorted([each for each in self._seen - self.descendants() if each.lives])

    def node(self, role: str) -> Process | None:
        """The adapter of the first node of this role."""
        return next((each for name, each in sorted(self.nodes().items()) if name.startswith(role)), None)

    def nodes(self) -> dict[str, Process]:
        found = [(_NODE.search(each.command), each) for each in self.descendants()]
        return {match[1]: each for match, each in found if match is not None}

    def part(self, role: str, part: str) -> Process | None:
        """Of a node: its adapter, its vLLM server, or the process of that server that computes."""
        at = self.node(role)
        if at is None or part == "adapter":
            return at
        tree = _tree()
        server = next((each for each in tree.get(at.pid, []) if "api_server" in each.command), None)
        if server is None or part == "server":
            return server
        return next((each for each in tree.get(server.pid, []) if "EngineCore" in each.command), None)

    def servers(self) -> dict[str, str]:
        """The URL of each node's vLLM server."""
        found = {}
        for name in self.nodes():
            server = self.part(name, "server")
            match = re.search(r"--port\0(\d+)", server.command) if server is not None else None
            if match is not None:
                found[name] = f"http://127.0.0.1:{match[1]}"
        return found

    # Faults. Each returns a description of its effect, "" if it found no target.

    def kill(self, role: str, part: str) -> str:
        victim = self.part(role, part)
        if victim is None:
            return ""
        os.kill(victim.pid, signal.SIGKILL)
        return f"killed {victim.pid}"

    def stall(self, role: str, part: str) -> str:
        """Stops a process for a while; a server with all its children."""
        victim = self.part(role, part)
        if victim is None:
            return ""
        stopped = [victim.pid]
        if part == "server":
            tree = _tree()
            for pid in stopped:
                stopped += [each.pid for each in tree.get(pid, [])]
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(self._stall_s)
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        return f"stopped {victim.pid} and {len(stopped) - 1} more for {self._stall_s:g} s"

    def cut_pages(self, role: str) -> str:
        """Cuts the connections between a server's connector and the adapter."""
        at = self.node(role)
        if at is None:
            return ""
        own, cut = at.sockets(), 0
        for line in _read("/proc/net/unix").splitlines()[1:]:
            state, inode, path = [*line.split(), ""][5:8]  # some have no path
            if path.endswith("/pages") and state == _CONNECTED and inode in own:
                cut += _cut(at, own[inode])
        return f"cut {cut} connections" if cut else ""

    def cut_link(self) -> str:
        """Cuts the connections between the adapters of the prefill and the decode node."""
        one, other = self.node("prefill"), self.node("decode")
        return _cut_between(one, other) if one is not None and other is not None else ""

    def cut_head(self, role: str) -> str:
        at = self.node(role)
        return _cut_between(at, self.head) if at is not None else ""

    def damage_memory(self, role: str, rng: random.Random) -> str:
        """Flips a byte in some pages of the adapter's DRAM cache."""
        at = self.node(role)
        maps = "" if at is None else _read(f"/proc/{at.pid}/maps")
        arena = re.search(r"^(\w+)-(\w+) rw-s .*isthmus-arena", maps, re.MULTILINE)
        if at is None or arena is None:
            return ""
        start, end = (int(each, 16) for each in arena.groups())
        with suppress(OSError), Path(f"/proc/{at.pid}/mem").open("r+b", buffering=0) as memory:
            damaged = _flip(memory.fileno(), start + PAGE, end, rng)
            return f"damaged {damaged} pages" if damaged else ""
        return ""

    def damage_files(self, folder: Path, rng: random.Random) -> str:
        """Flips bytes in the files of the SSD tiers."""
        damaged = 0
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.stat().st_size > PAGE:
                with path.open("r+b", buffering=0) as file:
                    damaged += _flip(file.fileno(), 0, path.stat().st_size, rng)
        return f"damaged {damaged} pages" if damaged else ""


def _flip(fd: int, start: int, end: int, rng: random.Random, step: int = 256 * PAGE) -> int:
    """One byte in DAMAGED_SHARE of the pages that are not empty; how many those were."""
    count = 0
    for at in range(start, end, step):
        data = os.pread(fd, min(step, end - at), at)
        for page in range(0, len(data), PAGE):
            if any(data[page : page + PAGE]) and rng.random() < DAMAGED_SHARE:
                where = page + rng.randrange(min(PAGE, len(data) - page))
                os.pwrite(fd, bytes([data[where] ^ 0xFF]), at + where)
                count += 1
    return count


def _cut_between(one: Process, other: Process) -> str:
    own, its = one.sockets(), other.sockets()
    established = [(mine, theirs, inode) for mine, theirs, state, inode in _tcp() if state == _ESTABLISHED]
    its_addresses = {(mine, theirs) for mine, theirs, inode in established if inode in its}
    victims = [
        own[inode] for mine, theirs, inode in established if inode in own and (theirs, mine) in its_addresses
    ]
    cut = sum([_cut(one, fd) for fd in victims])
    return f"cut {cut} connections" if cut else ""


def _cut(process: Process, fd: int) -> bool:
    """Shuts a connection of another process; False if it is gone."""
    try:
        at = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        copy = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_GETFD, at, fd, 0)
        if copy < 0:
            return False
        with socket.socket(fileno=copy) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
            return True
        return False
    finally:
        os.close(at)


Fault = Callable[[Cluster, int, random.Random], str]


def _role(number: int) -> str:
    return ("prefill", "decode")[number % 2]


KILLS: dict[str, Fault] = {
    f"{role}-{part}": (lambda cluster, _, __, role=role, part=part: cluster.kill(role, part))  # type: ignore[misc]
    for role in ("prefill", "decode")
    for part in PARTS
}
FAULTS: dict[str, Fault] = KILLS | {
    "socket": lambda cluster, number, _: cluster.cut_pages(_role(number)),
    "link": lambda cluster, _, __: cluster.cut_link(),
    "head-link": lambda cluster, number, _: cluster.cut_head(_role(number)),
    "page": lambda cluster, number, rng: cluster.damage_memory(_role(number), rng),
    "stall": lambda cluster, number, _: cluster.stall(_role(number), PARTS[number // 2 % 2]),
}
"""Faults by kind; the number of a fault chooses its node."""
