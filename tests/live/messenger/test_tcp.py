"""How a port writes, and how a socket is set up: against sockets and lanes that note what is done to them."""

from __future__ import annotations

import asyncio
import socket
from unittest.mock import Mock

import pytest

from isthmus.live.messenger.streams import tune
from isthmus.live.messenger.tcp import BULK_BYTES, WRITE_BUDGET, TcpPort


class Pushed:
    """A connection that takes batches of so many bytes, one after the other, and then nothing."""

    def __init__(self, order: list[str], name: str, *batches: int) -> None:
        self._order, self._name, self._batches = order, name, list(batches)

    def push(self) -> int:
        if not self._batches:
            return 0
        self._order.append(self._name)
        return self._batches.pop(0)


def pumped(wires: dict[str, tuple[int, ...]], turns: int = 1) -> list[str]:
    """Which connections wrote, in order, in so many turns of the event loop."""
    order: list[str] = []

    async def work() -> list[str]:
        port = TcpPort(bool)
        port._wires = {name: Pushed(order, name, *batches) for name, batches in wires.items()}  # type: ignore[assignment, misc]
        port.wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        return list(order)

    return asyncio.run(work())


def test_large_batches_take_turns_and_small_messages_stay_on_one_connection() -> None:
    """After `WRITE_BUDGET` bytes the event loop gets a turn."""
    assert pumped({"a": (BULK_BYTES,) * 3, "b": (BULK_BYTES,) * 3}) == list("ababab")
    assert pumped({"a": (), "b": (100, BULK_BYTES), "c": (50,)}) == list("bbc")
    assert pumped({"a": (WRITE_BUDGET,) * 2, "b": (WRITE_BUDGET,) * 2}, turns=3) == list("aba")


@pytest.mark.parametrize(
    ("here", "there", "is_local"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_only_within_a_host_the_kernels_choice_of_congestion_control_is_overruled(
    here: str, there: str, is_local: bool
) -> None:
    tuned = Mock()
    tuned.getsockname.return_value, tuned.getpeername.return_value = (here, 2), (there, 1)
    tune(tuned)
    options = {call.args[:2]: call.args[2] for call in tuned.setsockopt.call_args_list}
    assert options.get((socket.IPPROTO_TCP, socket.TCP_CONGESTION)) == (b"cubic" if is_local else None)
    tuned.setblocking.assert_called_once_with(False)
    assert options[socket.IPPROTO_TCP, socket.TCP_NODELAY] == 1
    assert options[socket.SOL_SOCKET, socket.SO_KEEPALIVE] == 1
    assert options[socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT] == 60_000
