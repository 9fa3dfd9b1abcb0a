"""`python -m benchmarks vllm-routing`: where prompts are prefilled, by what is cached there and otherwise.

A trace of conversations on two vLLM prefill servers and one that decodes, all real: under Isthmus's policies, which
differ in nothing else, and under vLLM's toy proxy, which takes servers in turn. The trace is scaled to one small
machine. Of its conversations every so many-th is taken, whole, so that prompts come back in it as often as in all;
one hash id stands for one block of the engine; times are divided. Sides get the same prompts at the same times, one
side after the other, each with servers of its own that have nothing cached, pinned to the same cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
from rich.table import Table

from benchmarks.peers.servers import Running, Side, running
from benchmarks.served import last_line, reserved_port, served
from isthmus.bench import BenchError
from isthmus.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.types import NodeId, Role
from isthmus.lab.sim.workloads import Replay, load
from isthmus.live.cluster.launcher import LaunchSpec, cores_of
from isthmus.live.servers.server import environment_of, settle

PREFILLS = 2
PROXY = "proxy"
"""The side of vLLM's own proxy. The others are MODE/POLICY, of Isthmus."""
SIDES = ("nixl/isthmus", "nixl/round_robin", PROXY, "pool/isthmus", "pool/round_robin")
NAME = "served"
WARM = 8
"""Prompts of random tokens, not counted, after which the servers have met."""
WARM_TOKENS = 256
FIRST_TOKEN = 3
"""Lower ids may be special."""
START_S = 400.0
NIXL = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"num_threads": 0},
}  # fmt: skip
"""Of the servers of all sides alike. vLLM's default are four more threads of NIXL a server, here on one core."""
ROOT = Path(__file__).parents[1]
CONNECTOR = f"{ROOT / 'connectors/vllm/src'}:{ROOT / 'src'}"


@dataclass(frozen=True)
class Plan:
    """`python`: one with vLLM; `proxy`: vLLM's toy_proxy_server.py; `cost`: what `isthmus profile --vllm` wrote of such
    a server; `folder`: for logs. `kv_memory`: of each server, in bytes, one turn each; `dram`: of each node's cache in
    mode pool, None for as much. One conversation in `every` is taken, times are divided by `speed`. `vocabulary`:
    token ids below it are drawn; `tokens`: of each answer.
    """

    model: Path
    python: str
    trace: Path
    folder: Path
    proxy: Path | None = None
    cost: Path | None = None
    sides: tuple[str, ...] = SIDES
    kv_memory: tuple[int, ...] = (1 << 30,)
    dram: int | None = None
    every: int = 40
    speed: float = 24.0
    block: int = 32
    max_length: int = 2048
    tokens: int = 4
    vocabulary: int = 250
    seed: int = 1


class Asked(msgspec.Struct, frozen=True):
    """One request: when it is sent, and its prompt. `ids` stand for its blocks."""

    at_s: float
    prompt: list[int]
    ids: tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """`ttft_s`: from when it was to be sent; `cached`: prompt tokens that were not computed, where the side says so."""

    ttft_s: float = 0.0
    cached: int | None = None
    error: str = ""


class Turn(msgspec.Struct, frozen=True):
    """`hit_rate`: cached prompt tokens over prompt tokens, at the prefill servers."""

    side: str
    kv_memory: int
    hit_rate: float
    answers: list[Answer]


def check(plan: Plan) -> None:
    """Raises ConfigError."""
    for side in plan.sides:
        if side != PROXY and not side.startswith(("nixl/", "pool/")):
            raise ConfigError(f"--sides: {side} is neither {PROXY} nor nixl/POLICY nor pool/POLICY")
    if PROXY in plan.sides and plan.proxy is None:
        raise ConfigError(f"--proxy: side {PROXY} needs vLLM's toy_proxy_server.py")


def run(plan: Plan, report: Callable[[str], None]) -> list[Turn]:
    """All sides with each size of memory. Raises StartError or BenchError for servers that do not start."""
    asked, turns = requests_of(plan), list[Turn]()
    for kv_memory in plan.kv_memory:
        for side in plan.sides:
            log = plan.folder / f"{side.replace('/', '-')}-{kv_memory >> 20}"
            turn = _by_proxy if side == PROXY else _by_isthmus
            turns.append(turn(plan, side, kv_memory, asked, log))
            report(_line(turns[-1]))
    return turns


# What is asked.


def requests_of(plan: Plan) -> list[Asked]:
    """Equal ids in the trace are equal blocks of tokens, others are not. Times are from the first request."""
    trace = load(plan.trace, Replay(speed=plan.speed, spread_seed=plan.seed))
    conversations = dict.fromkeys(each.blocks[:2] for each in trace.requests)  # all begin with one block
    taken = set(list(conversations)[:: plan.every])
    chosen = [each for each in trace.requests if each.blocks[:2] in taken]
    asked = []
    for each in chosen:
        length = -(-each.num_tokens * plan.block // trace.block_size)
        length = min(length, plan.max_length - plan.tokens)
        ids = each.blocks[: -(-length // plan.block)]
        prompt = [token for name in ids for token in _block(plan, str(name))][:length]
        asked.append(Asked((each.arrival_ns - chosen[0].arrival_ns) / 1e9, prompt, ids))
    return asked


def _block(plan: Plan, name: str) -> list[int]:
    span = range(FIRST_TOKEN, plan.vocabulary)
    return random.Random(f"{plan.seed} {name}").choices(span, k=plan.block)


def possible(asked: Sequence[Asked], block: int) -> tuple[float, int]:
    """The hit rate of one cache that never forgets, and how many different tokens it would have at the end."""
    seen, cached = set[int](), 0
    for each in asked:
        full = each.ids[: (len(each.prompt) - 1) // block]  # the last token is always computed
        missing = (at for at, name in enumerate(full) if name not in seen)
        cached += next(missing, len(full)) * block
        seen.update(each.ids[: len(each.prompt) // block])
    return cached / sum([len(each.prompt) for each in asked]), len(seen) * block


# Isthmus.


def _by_isthmus(plan: Plan, side: str, kv_memory: int, asked: Sequence[Asked], log: Path) -> Turn:
    config = log.with_suffix(".yaml")
    config.write_text(json.dumps(config_of(plan, side, kv_memory), indent=1))
    answers = asyncio.run(_serve_and_ask(plan, config, asked, log))
    good = [(each, one) for each, one in zip(asked, answers, strict=True) if not one.error]
    hits = sum([one.cached or 0 for _, one in good])
    return Turn(side, kv_memory, hits / max(1, sum([len(each.prompt) for each, _ in good])), answers)


def config_of(plan: Plan, side: str, kv_memory: int) -> dict[str, Any]:
    """Of `isthmus serve`."""
    mode, policy = side.split("/", 1)
    vllm: dict[str, Any] = {"python": plan.python, "transfer": mode, "env": {"PYTHONPATH": CONNECTOR}}
    if mode == "nixl":
        vllm |= {
            "args": ["--kv-transfer-config", json.dumps(NIXL)],
            "env": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        }
    engine: dict[str, Any] = {
        "kind": "vllm", "device": "cpu", "block_size": plan.block, "threads": 1, "kv_memory": kv_memory,
        "max_length": plan.max_length, "vllm": vllm,
    }  # fmt: skip
    if plan.cost is not None:
        engine["cost"] = str(plan.cost.resolve())
    found: dict[str, Any] = {
        "model": str(plan.model), "served_model_name": NAME, "port": 0, "policy": policy,
        "roles": {"prefill": PREFILLS, "decode": 1}, "engine": engine,
        "limits": {"start_s": START_S, "silence_s": 30},
    }  # fmt: skip
    if mode == "pool":
        found["cache"] = {"dram": plan.dram or kv_memory}
    return found


async def _serve_and_ask(plan: Plan, config: Path, asked: Sequence[Asked], log: Path) -> list[Answer]:
    async with served(config, log.with_suffix(".log"), START_S) as (url, _):
        await _ask_all(plan, url, _warm(plan))
        answers = await _ask_all(plan, url, asked)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
            log.with_suffix(".metrics").write_text(await reply.text())
    return answers


# vLLM's servers behind its proxy.


def _by_proxy(plan: Plan, side: str, kv_memory: int, asked: Sequence[Asked], log: Path) -> Turn:
    """The servers have the options and the cores that those of Isthmus's side have, but for KV events."""
    config = Config.model_validate(config_of(plan, "nixl/round_robin", kv_memory))
    with contextlib.ExitStack() as stack:

        def start(number: int) -> Running:
            server = _server(plan, config, number, stack.enter_context(reserved_port()))
            found = stack.enter_context(running(server, log.with_name(f"{log.name}-{number}.log")))
            asyncio.run(settle(found.pid, cores_of(number, 1)))
            return found

        with ThreadPoolExecutor() as pool:  # they take long to start, and do so at once under Isthmus
            servers = list(pool.map(start, range(PREFILLS + 1)))
        port = stack.enter_context(reserved_port())
        url = stack.enter_context(_proxy(plan, servers, port, log.with_suffix(".log")))
        asyncio.run(_ask_all(plan, url, _warm(plan)))
        before = [_hits(each.url) for each in servers[:PREFILLS]]
        answers = asyncio.run(_ask_all(plan, url, asked))
        after = [_hits(each.url) for each in servers[:PREFILLS]]
    hits, queries = (sum([b[at] - a[at] for a, b in zip(before, after, strict=True)]) for at in (0, 1))
    return Turn(side, kv_memory, hits / max(1.0, queries), answers)


def _server(plan: Plan, config: Config, number: int, meets: int) -> Side:
    """`meets`: the port at which decode servers find it."""
    cores = cores_of(number, 1)
    name = NodeId(f"prefill-{number}")
    spec = LaunchSpec(name, Role.PREFILL, "", "", str(plan.model), 1, "", cores=cores)
    settings = environment_of(config, spec, meets)
    settings["VLLM_API_KEY"] = ""  # the proxy has none
    command = (
        "taskset", "-c", ",".join(map(str, cores)), plan.python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(plan.model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", "{port}",
        "--block-size", str(plan.block), "--max-model-len", str(plan.max_length), "--enable-prefix-caching",
        "--enable-prompt-tokens-details", "--enforce-eager",
        "--kv-cache-memory-bytes", str(config.engine.kv_memory),
        "--kv-transfer-config", json.dumps(NIXL),
    )  # fmt: skip
    return Side("vLLM", command, settings)


@contextlib.contextmanager
def _proxy(plan: Plan, servers: Sequence[Running], port: int, log: Path) -> Iterator[str]:
    """Its URL."""
    ports = [each.url.rpartition(":")[2] for each in servers]
    command = [
        plan.python, str(plan.proxy), "--host", "127.0.0.1", "--port", str(port),
        "--prefiller-hosts", *["127.0.0.1"] * PREFILLS, "--prefiller-ports", *ports[:PREFILLS],
        "--decoder-hosts", "127.0.0.1", "--decoder-ports", *ports[PREFILLS:],
    ]  # fmt: skip
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        while not _is_up(f"{url}/healthcheck"):
            if process.poll() is not None or time.monotonic() > until:
                raise BenchError(f"the proxy did not start; {log} ends with: {last_line(log.read_text())}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _hits(url: str) -> tuple[float, float]:
    """Tokens that vLLM's prefix cache had, and that it was asked for, so far."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return total(text, "vllm:prefix_cache_hits_total"), total(text, "vllm:prefix_cache_queries_total")


def total(metrics: str, name: str) -> float:
    """Of a counter, over all labels."""
    lines = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum([float(line.rpartition(" ")[2]) for line in lines])


# Asking.


def _warm(plan: Plan) -> list[Asked]:
    rng = random.Random(f"{plan.seed} warm")
    span = range(FIRST_TOKEN, plan.vocabulary)
    return [Asked(0.0, rng.choices(span, k=WARM_TOKENS), ()) for _ in range(WARM)]


async def _ask_all(plan: Plan, url: str, asked: Sequence[Asked]) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        return list(await asyncio.gather(*[_ask(plan, session, url, each, began) for each in asked]))


async def _ask(plan: Plan, session: aiohttp.ClientSession, url: str, asked: Asked, began: float) -> Answer:
    body = {
        "model": NAME, "prompt": asked.prompt, "max_tokens": plan.tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    due = began + asked.at_s
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    try:
        return await _read(session, url, body, due)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")


async def _read(session: aiohttp.ClientSession, url: str, body: dict[str, Any], due: float) -> Answer:
    ttft_s, num_tokens, usage = 0.0, 0, dict[str, Any]()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            return Answer(error=f"HTTP {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                return Answer(error=str(chunk["error"]))
            usage = chunk.get("usage") or usage
            new = sum([len(choice.get("token_ids") or ()) for choice in chunk["choices"]])
            if new and not num_tokens:
                ttft_s = time.perf_counter() - due
            num_tokens += new
    if num_tokens != body["max_tokens"]:
        return Answer(error=f"{num_tokens} tokens, not {body['max_tokens']}")
    return Answer(ttft_s, (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))


# What came of it.


def _figures(turn: Turn) -> list[str]:
    times = [1000 * each.ttft_s for each in turn.answers if not each.error]
    failed = str(len(turn.answers) - len(times))
    if len(times) < 2:
        return [f"{turn.hit_rate:.3f}", "-", "-", "-", failed]
    found = (statistics.mean(times), statistics.median(times), statistics.quantiles(times, n=10)[-1])
    return [f"{turn.hit_rate:.3f}", *[f"{each:.0f}" for each in found], failed]


def _line(turn: Turn) -> str:
    hit_rate, mean, median, p90, failed = _figures(turn)
    return (
        f"{turn.side}, {turn.kv_memory >> 20} MiB: hit rate {hit_rate}, "
        f"TTFT mean {mean} ms, median {median}, p90 {p90}, failed {failed}"
    )


def table(plan: Plan, turns: Sequence[Turn]) -> Table:
    asked = requests_of(plan)
    best, distinct = possible(asked, plan.block)
    found = Table(
        title=f"{len(asked)} prompts in {asked[-1].at_s:.0f} s, "
        f"{statistics.mean([len(each.prompt) for each in asked]):.0f} tokens in the mean, {distinct} different ones; "
        f"a cache that has all would hit {best:.3f}; {PREFILLS} prefill servers and 1 decode server "
        f"on {len(os.sched_getaffinity(0))} cores, one each"
    )
    for head in ("side", "KV MiB of each", "hit rate", "TTFT ms mean", "median", "p90", "failed"):
        found.add_column(head, justify="left" if head == "side" else "right")
    for turn in turns:
        found.add_row(turn.side, str(turn.kv_memory >> 20), *_figures(turn))
    return found
