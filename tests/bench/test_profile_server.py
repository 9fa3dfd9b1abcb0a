"""What a server is asked when it is measured, and that a curve comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from isthmus.bench.profile import _mean_gap, profile_server
from isthmus.core.blocks import KVLayout
from isthmus.core.errors import StartError
from isthmus.core.types import FinishReason
from isthmus.live.servers.client import Computed, EngineError, Token

LAYOUT = KVLayout("float32", 16, 3, 2, 16)


class Server:
    """A client of nobody: takes a moment for each prompt and token."""

    url = "http://there"

    def __init__(self, *, refuses: bool = False) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.most = self._running = 0
        self.closed = False
        self._refuses = refuses

    async def compute(self, key: str, body: dict[str, Any]) -> Computed:
        if self._refuses:
            raise EngineError("no")
        self.prompts.append(tuple(body["prompt"]))
        await asyncio.sleep(0.0005)
        return Computed(0, None)

    async def answer(
        self, key: str, body: dict[str, Any], num_top: int | None
    ) -> AsyncGenerator[list[Token], None]:
        self._running += 1
        self.most = max(self.most, self._running)
        for at in range(body["max_tokens"]):
            await asyncio.sleep(0.0002)
            last = at + 1 == body["max_tokens"]
            yield [Token(5, finish=FinishReason.LENGTH if last else None)]
        self._running -= 1

    async def close(self) -> None:
        self.closed = True


def profiled(server: Server) -> Any:
    return profile_server(
        lambda: server,  # type: ignore[arg-type, return-value]
        LAYOUT, vocab_size=99, max_length=200, kv_tokens=4096, max_sequences=4, origin="here", rounds=1,
    )  # fmt: skip


def test_a_curve_of_what_was_measured() -> None:
    server = Server()
    found = profiled(server)
    assert server.closed and server.most == 4
    prompts = [prompt for prompt in server.prompts if len(prompt) in (64, 128)]
    assert len(set(prompts)) == len(prompts), "nothing that is measured may be cached"
    assert all(3 <= token < 99 for prompt in server.prompts for token in prompt)
    assert (found.curve.num_layers, found.curve.kv_token_bytes) == (3, 3 * 256)
    assert [size for size, _ in found.curve.decode_points] == [1, 2, 4]
    assert found.mixed_error_percent is None and all(case.seconds > 0 for case in found.cases)


def test_a_server_that_does_not_answer() -> None:
    server = Server(refuses=True)
    with pytest.raises(StartError, match="vLLM at http://there: no"):
        profiled(server)
    assert server.closed


def test_gaps_count_while_all_answer() -> None:
    assert _mean_gap([0, 1, 2, 4, 9], 1, 4) == 1.5
    assert _mean_gap([0, 9], 1, 4) is None
