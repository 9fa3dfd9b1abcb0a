"""Machines on one machine: network namespaces with an address each, joined by a bridge. Nothing that listens in one of
them is reached from another but over the bridge, and each has a loopback interface of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PREFIX = "isthmus-test"
HOSTS = Path("/etc/netns")
"""Where `ip netns exec` takes the files from that it puts in the place of those in /etc."""


class Machine:
    """One namespace."""

    def __init__(self, space: str, name: str, address: str, address6: str) -> None:
        self.space, self.name, self.address, self.address6 = space, name, address, address6

    def start(
        self, arguments: list[str], log: Path, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Standard output and error go to `log`."""
        with log.open("wb") as sink:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.space, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
            )


@contextlib.contextmanager
def machines(*names: str) -> Iterator[dict[str, Machine]]:
    """Machines that know each other by name. This process reaches them too. Skips the test where namespaces cannot be
    made; afterwards they are gone."""
    if shutil.which("ip") is None:
        pytest.skip("machines are made with the ip command, which is not here")
    pid = os.getpid()
    _sweep()
    switch = f"{PREFIX}-{pid}-switch"
    made = subprocess.run(["ip", "netns", "add", switch], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    net, net6 = f"10.{200 + pid % 50}.{pid // 50 % 250}", f"fd00:{pid % 65536:x}"
    found = {}
    try:
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names, 1):
            space = f"{PREFIX}-{pid}-{name}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            found[name] = Machine(space, name, f"{net}.{number}", f"{net6}::{number}")
            _plug(switch, name, f"{net}.{number}/24", f"{net6}::{number}/64", space)
        _plug(switch, f"isth{pid}", f"{net}.254/24", f"{net6}::fe/64", None)
        hosts = "".join(f"{each.address} {each.name}\n" for each in found.values())
        for name in names:
            folder = HOSTS / f"{PREFIX}-{pid}-{name}"
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(hosts)
        yield found
    finally:
        for space in _spaces():
            if space.startswith(f"{PREFIX}-{pid}-"):
                _remove(space)


def _plug(switch: str, name: str, address: str, address6: str, space: str | None) -> None:
    """A cable from the switch to a machine, or to this one."""
    end = ("-n", space) if space is not None else ()
    peer = ("netns", space) if space is not None else ("netns", str(os.getpid()))
    device = "eth0" if space is not None else name
    _ip("-n", switch, "link", "add", f"to-{name}"[:15], "type", "veth", "peer", "name", device, *peer)
    _ip("-n", switch, "link", "set", f"to-{name}"[:15], "master", "bridge", "up")
    _ip(*end, "address", "add", address, "dev", device)
    _ip(*end, "address", "add", address6, "dev", device, "nodad")
    _ip(*end, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _spaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"^({PREFIX}-\S+)", listed, re.M)


def _sweep() -> None:
    """What a run left that was killed."""
    for space in _spaces():
        if not Path(f"/proc/{space.removeprefix(f'{PREFIX}-').split('-')[0]}").exists():
            _remove(space, check=False)  # another worker may do so, too


def _remove(space: str, *, check: bool = True) -> None:
    subprocess.run(["ip", "netns", "delete", space], check=check)
    shutil.rmtree(HOSTS / space, ignore_errors=True)
