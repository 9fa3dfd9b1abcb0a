"""Pairs of servers that hand KV over as vLLM's and SGLang's do, in the event loop of a test."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

from .plain_fake import FakeServer, answer_whole


class Kept:
    """KV that prefill servers keep, by the name in a dictionary, which is good for one request."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.used: list[str] = []
        self.released: list[str] = []
        self.wrong: list[str] = []
        """Names of dictionaries that came twice, or with another prompt."""
        self.names = count()

    def keep(self, prompt: Any) -> str:
        name = f"kept-{next(self.names)}"
        self.held[name] = prompt
        return name

    def take(self, name: str, prompt: Any) -> None:
        if self.held.pop(name, None) != prompt:
            self.wrong.append(name)
        self.used.append(name)

    def release(self, name: str) -> None:
        if self.held.pop(name, None) is None:
            self.wrong.append(name)
        self.released.append(name)


class FakeHalf(FakeServer):
    """A server with a KV connector: `connector` is `nixl`, `mooncake`, or "" for one that has none.

    Beyond `FakeServer`, `fault` of a leg: `die` (the connection breaks off), of a prefill leg `refuse` (HTTP 400).
    """

    def __init__(self, kept: Kept, *models: str, connector: str = "nixl") -> None:
        super().__init__(*models)
        self.kept, self.connector = kept, connector
        self.legs: list[dict[str, Any]] = []
        """Bodies of the requests with a dictionary."""

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        asked = json.loads(body) if method == "POST" else {}
        params = asked.get("kv_transfer_params")
        if params is None or self.fault == "hang":
            return await super()._answer(writer, method, target, headers, body)
        self.legs.append(asked)
        if params["do_remote_decode"]:
            return await self._prefill(writer, asked, params)
        name = params.get("remote_request_id") or params["transfer_id"]
        if asked["model"] not in self.models:
            self.kept.release(name)
            return answer_whole(writer, b'{"error": {"message": "no such model"}}', "404 Not Found")
        if self.fault != "error":
            self.kept.take(name, asked["prompt"])
        if self.fault == "die":
            return writer.close()
        return await super()._answer(writer, method, target, headers, body)

    async def _prefill(
        self, writer: asyncio.StreamWriter, asked: dict[str, Any], params: dict[str, Any]
    ) -> None:
        assert asked["max_tokens"] == 1 and not asked["stream"] and "stream_options" not in asked
        await self.gate.wait()
        match self.fault:
            case "die":
                return writer.close()
            case "error":
                return answer_whole(writer, b'{"error": {"message": "ill"}}', "500 Error")
            case "refuse":
                return answer_whole(writer, b'{"error": {"message": "wrong"}}', "400 Bad Request")
        answer: dict[str, Any] = {"choices": [{"text": "x"}]}
        if self.connector == "nixl":
            name = self.kept.keep(asked["prompt"])
            own = {"remote_request_id": name, "remote_block_ids": [[1, 2]], "remote_engine_id": self.url}
            answer["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "tp_size": 1,
                **own,
            }
        elif self.connector == "mooncake":
            self.kept.held[params["transfer_id"]] = asked["prompt"]
        return answer_whole(writer, json.dumps(answer).encode())


class Rooms:
    """Where both legs of SGLang meet: each waits for the other one."""

    def __init__(self) -> None:
        self._met: dict[int, asyncio.Event] = {}
        self.entered: list[tuple[str, int]] = []

    def enter(self, role: str, room: int) -> asyncio.Event:
        self.entered.append((role, room))
        return self._met.setdefault(room, asyncio.Event())


class FakeSglang(FakeServer):
    """A server with `--disaggregation-mode`. `fault` of a prefill leg: `die`."""

    def __init__(self, rooms: Rooms, role: str) -> None:
        super().__init__(metrics="")
        self.rooms, self.role = rooms, role

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        if target == "/server_info" and self.fault != "hang":
            told = {"disaggregation_mode": self.role, "disaggregation_bootstrap_port": 8765, "more": [1]}
            return answer_whole(writer, json.dumps(told).encode())
        if method == "POST" and self.fault != "hang":
            asked = json.loads(body)
            if self.fault == "die":
                return writer.close()
            met = self.rooms.enter(self.role, asked["bootstrap_room"])
            if self.role == "prefill":
                met.set()
            await met.wait()
        return await super()._answer(writer, method, target, headers, body)
