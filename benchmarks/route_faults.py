"""The load `faults`: what a router does when its servers are killed, slow, or back, and when it is started again.

All servers say the same to the same prompt, so that any other text, whole or begun, is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import msgspec

from benchmarks.paced import answer_to, rendered
from benchmarks.route_client import Client, Message, Reply
from benchmarks.served import POLL_S, reserved_port
from isthmus.core.errors import StartError

WORKERS, PROMPTS, ANSWER_TOKENS = 12, 40, 24
REPEATS = 32
KILLS, KILL_S, DOWN_S = 20, 1.0, (0.1, 1.0)
"""So many kills, one in so many seconds; each server is started again after one of two pauses."""
HANG_EVERY = 5
"""At one kill in so many another server leaves a request without an answer; at the others it refuses two, HTTP 500."""
SLOW_S, SLOW_LOAD_S, BACK_S = 4.0, 12.0, 12.0
"""How late each answer of a slow server is, for how long, and how long a server that is back is waited for."""
START_S = 30.0


class Faults(msgspec.Struct, frozen=True):
    """What became of answers under kills, refusals and hangs: `whole` ones, those that ended with an error that was
    `told`, or were `cut` without one; `wrong`: of all, with other text; `longest_s`: the longest.

    `back_s`: until a server that answers again gets a request. With a slow server: `slow_ttft_ms`, the mean; `left_s`:
    until the last request was sent that waited for it; `again_s`: until it gets requests after it is quick. None: not
    within `BACK_S`. `repeats`: of `REPEATS` prompts, those that find their server's cache when the router is started
    again.
    """

    whole: int
    told: int
    cut: int
    wrong: int
    longest_s: float
    back_s: float | None
    slow_ttft_ms: float | None
    left_s: float
    again_s: float | None
    repeats: int


class Killable:
    """A paced server of a port of its own, that can be killed and started again."""

    def __init__(self, port: int, options: Sequence[str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "benchmarks.paced_server", "--port", str(port), *options]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(self._command, stdout=sink, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Returns when it answers. Raises StartError."""
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/health", trust_env=False)
                return
            if time.monotonic() > until:
                raise StartError(
                    f"a server did not answer within {START_S:g} s; what it said is in {self._log}"
                )
            time.sleep(POLL_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def fault(self, **faults: float) -> None:
        httpx.post(f"{self.url}/fault", json=faults, trust_env=False)

    def asked(self) -> int:
        """Prompt tokens that it was given since it started."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return round(float(re.findall(r"^vllm:prompt_tokens_total{.*} (\S+)$", text, re.M)[0]))


@contextlib.contextmanager
def killable(num: int, options: Sequence[str], folder: Path) -> Iterator[list[Killable]]:
    """So many servers that answer."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(num)]
        servers = [Killable(port, options, folder / f"server-{at}.log") for at, port in enumerate(ports)]
        for server in servers:
            stack.callback(server.kill)
            server.start()
        for server in servers:
            server.wait()
        yield servers


def _chat(name: str, times: int = 30) -> list[Message]:
    return [{"role": "user", "content": name + " a story of the sea" * times}]


class _Load:
    """Workers that ask without a pause, and what became of it all. `repeated`: whether `PROMPTS` prompts come in turn,
    else each is a new one."""

    def __init__(self, client: Client, name: str, *, repeated: bool) -> None:
        self._client, self._name, self._repeated = client, name, repeated
        self.replies: list[tuple[float, Reply]] = []
        self.wrong = 0
        self._number = 0
        self._is_over = False

    async def _work(self) -> None:
        while not self._is_over:
            self._number += 1
            number = self._number % PROMPTS if self._repeated else self._number
            prompt, sent_s = _chat(f"{self._name} {number}"), time.monotonic()
            reply = await self._client.ask(prompt, ANSWER_TOKENS)
            right = answer_to(rendered(prompt), ANSWER_TOKENS)
            self.wrong += not (right.startswith(reply.text) if reply.error else right == reply.text)
            self.replies.append((sent_s, reply))
            if reply.error:
                await asyncio.sleep(0.1)  # as a client that is refused

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ends when the last answer is here."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())
            try:
                yield
            finally:
                self._is_over = True


async def faults(
    client: Client, servers: Sequence[Killable], again: Callable[[], Client | None], seed: int
) -> Faults:
    """All parts in one run of a router. `again`: starts the router again and returns the client of it."""
    drawn = random.Random(seed)
    kills = _Load(client, "kills", repeated=True)
    async with kills.running():
        for number in range(KILLS):
            await asyncio.sleep(KILL_S)
            server, other = drawn.sample(servers, 2)
            await asyncio.to_thread(other.fault, **({"hang": 1} if number % HANG_EVERY == 0 else {"fail": 2}))
            server.kill()
            await asyncio.sleep(drawn.choice(DOWN_S))
            server.start()
            await asyncio.to_thread(server.wait)
    back = _Load(client, "back", repeated=False)
    async with back.running():
        servers[1].kill()
        await asyncio.sleep(3)
        servers[1].start()
        await asyncio.to_thread(servers[1].wait)
        back_s = await _until(lambda: servers[1].asked() > 0)
    slow = _Load(client, "slow", repeated=False)
    async with slow.running():
        await asyncio.to_thread(servers[0].fault, slow_s=SLOW_S)
        begin_s = time.monotonic()
        await asyncio.sleep(SLOW_LOAD_S)
        end_s = time.monotonic()
        await asyncio.to_thread(servers[0].fault)
        await asyncio.sleep(SLOW_S + 0.5)  # the last late one
        asked = await asyncio.to_thread(servers[0].asked)
        again_s = await _until(lambda: servers[0].asked() > asked)
    ttfts_s = [reply.ttft_s for sent_s, reply in slow.replies if begin_s <= sent_s <= end_s and not reply.error]
    late_s = [sent_s - begin_s for sent_s, reply in slow.replies if reply.ttft_s >= SLOW_S / 2]
    errors = [reply.error for _, reply in kills.replies if reply.error]
    told = sum([error.startswith(("in the stream", "status")) for error in errors])
    return Faults(
        whole=len(kills.replies) - len(errors),
        told=told,
        cut=len(errors) - told,
        wrong=kills.wrong + back.wrong + slow.wrong,
        longest_s=max(reply.total_s for _, reply in kills.replies),
        back_s=back_s,
        slow_ttft_ms=1e3 * statistics.mean(ttfts_s) if ttfts_s else None,
        left_s=max([0.0, *late_s]),
        again_s=again_s,
        repeats=await _repeats(client, again),
    )


async def _until(is_so: Callable[[], bool]) -> float | None:
    """Seconds until it is so; None if not within `BACK_S`."""
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < BACK_S:
        if await asyncio.to_thread(is_so):
            return time.monotonic() - begin_s
        await asyncio.sleep(POLL_S)
    return None


async def _repeats(client: Client, again: Callable[[], Client | None]) -> int:
    """Four at once and in another order the first time, so that no rule of turns finds them again."""
    prompts = [_chat(f"repeat {number}", 100) for number in range(REPEATS)]
    for start in range(0, REPEATS, 4):
        await asyncio.gather(*[client.ask(prompt, 4) for prompt in prompts[start : start + 4]])
    await client.close()
    second = await asyncio.to_thread(again)
    if second is None:
        return 0
    random.Random(REPEATS).shuffle(prompts)
    replies = [await second.ask(prompt, 4) for prompt in prompts]
    await second.close()
    return sum([reply.cached_tokens > reply.prompt_tokens / 2 for reply in replies])
