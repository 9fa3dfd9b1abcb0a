"""`python -m benchmarks vllm-routing`: where prompts are prefilled, by what is cached there and otherwise.

A trace of conversations on two vLLM prefill servers and one that decodes, all real: under Isthmus's policies, which
differ in nothing else, under vLLM's toy proxy, which takes servers in turn, and under `isthmus route` before the same
servers, which may leave a prompt to the one that decodes. The trace is scaled to one small
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
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import httpx
import msgspec
from typer import Option

from benchmarks.options import ModelFolder, Seed, VllmPython
from benchmarks.served import Running, Side, reserved_port, running, served, started
from isthmus.bench import BenchError, serve
from isthmus.bench.options import SIZE, SIZES, WORDS
from isthmus.bench.study import Outcome, Report, plain, said, silent, table
from isthmus.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.types import NodeId, Role
from isthmus.lab.sim.workloads import Replay, load
from isthmus.live.cluster.launcher import LaunchSpec, cores_of
from isthmus.live.servers.server import environment_of, settle
from isthmus.sheet import Sheet

PROXY, ROUTE = "proxy", "route"
"""The sides of vLLM's own proxy, and of `isthmus route` before the same servers. The others are MODE/POLICY, of nodes
of Isthmus."""
SIDES = ("nixl/isthmus", "nixl/round_robin", PROXY, "pool/isthmus", "pool/round_robin")
NAME = "served"
WARM = 8
"""Prompts of random tokens, not counted, after which the servers have met."""
WARM_TOKENS = 256
FIRST_TOKEN = 3
"""Lower ids may be special."""
START_S, SILENCE_S = 400.0, 120.0
NIXL = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"num_threads": 0},
}  # fmt: skip
"""Of the servers of all sides alike. vLLM's default are four more threads of NIXL a server, here on one core."""
ROOT = Path(__file__).parents[1]
CONNECTOR = f"{ROOT / 'connectors/vllm/src'}:{ROOT / 'src'}"


@dataclass(frozen=True)
class Plan:
    model: ModelFolder
    vllm_python: VllmPython
    trace: Annotated[Path, Option(help="Mooncake's trace of conversations, or one of its form.")]
    folder: Annotated[Path, Option(help="Where configurations, logs and metrics are kept.")]
    proxy: Annotated[Path | None, Option(help="vLLM's toy_proxy_server.py.")] = None
    cost: Annotated[Path | None, Option(help="What isthmus profile --vllm wrote of such a server.")] = None
    sides: Annotated[
        tuple[str, ...], WORDS, Option(help="MODE/POLICY of Isthmus, mode nixl or pool; proxy; route.")
    ] = SIDES
    prefills: Annotated[int, Option(min=1, help="Prefill servers, beside one that decodes.")] = 2
    kv_memory: Annotated[
        tuple[int, ...], SIZES, Option(help="Of each server; a turn of all sides for each.")
    ] = (1 << 30,)
    dram: Annotated[int | None, SIZE, Option(help="Cache of each node in mode pool; default: as much.")] = None
    every: Annotated[int, Option(min=1, help="One conversation in so many is taken.")] = 40
    speed: Annotated[float, Option(help="Arrival times are divided by this.")] = 24.0
    block: Annotated[int, Option(min=1, help="Tokens of a block, for which one hash id stands.")] = 32
    max_length: Annotated[int, Option(min=2, help="Longer prompts are cut.")] = 2048
    tokens: Annotated[int, Option(min=2, help="Tokens of an answer.")] = 4
    vocabulary: Annotated[int, Option(min=4, help="Token ids below this are drawn.")] = 250
    seed: Seed = 1

    def __post_init__(self) -> None:
        for side in self.sides:
            if side not in (PROXY, ROUTE) and not side.startswith(("nixl/", "pool/")):
                raise ConfigError(
                    f"--sides: {side} is neither {PROXY} nor {ROUTE} nor nixl/POLICY nor pool/POLICY"
                )
        if PROXY in self.sides and self.proxy is None:
            raise ConfigError(f"--proxy: side {PROXY} needs vLLM's toy_proxy_server.py")


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


def run(plan: Plan, report: Report = silent) -> Outcome:
    """Which of two vLLM prefill servers gets a prompt: Isthmus's policies and vLLM's toy proxy, on a trace.

    All sides with each size of memory. Raises StartError or BenchError for servers that do not start.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    asked, turns = requests_of(plan), list[Turn]()
    for kv_memory in plan.kv_memory:
        for side in plan.sides:
            log = plan.folder / f"{side.replace('/', '-')}-{kv_memory >> 20}"
            turn = _by_http if side in (PROXY, ROUTE) else _by_isthmus
            turns.append(turn(plan, side, kv_memory, asked, log))
            report(
                f"{side}, {kv_memory >> 20} MiB: hit rate {turns[-1].hit_rate:.3f}, {said(_times(turns[-1]))}"
            )
    best, distinct = possible(asked, plan.block)
    title = (
        f"{len(asked)} prompts in {asked[-1].at_s:.0f} s, "
        f"{statistics.mean([len(each.prompt) for each in asked]):.0f} tokens in the mean, {distinct} different ones; "
        f"a cache that has all would hit {best:.3f}; {plan.prefills} prefill servers and 1 decode server "
        f"on {len(os.sched_getaffinity(0))} cores, one each"
    )
    return Outcome([table_of(title, turns)], plain(turns))


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
    with served(config, log.with_suffix(".log"), START_S) as (url, _):
        answers = asyncio.run(_ask_all(plan, url, asked, log.with_suffix(".metrics")))
    good = [(each, one) for each, one in zip(asked, answers, strict=True) if not one.error]
    hits = sum([one.cached or 0 for _, one in good])
    return Turn(side, kv_memory, hits / max(1, sum([len(each.prompt) for each, _ in good])), answers)


def config_of(plan: Plan, side: str, kv_memory: int) -> dict[str, Any]:
    """Of `isthmus serve`."""
    mode, policy = side.split("/", 1)
    vllm: dict[str, Any] = {"python": plan.vllm_python, "transfer": mode, "env": {"PYTHONPATH": CONNECTOR}}
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
        "roles": {"prefill": plan.prefills, "decode": 1}, "engine": engine,
        "limits": {"start_s": START_S, "silence_s": 30},
    }  # fmt: skip
    if mode == "pool":
        found["cache"] = {"dram": plan.dram or kv_memory}
    return found


# vLLM's servers behind its proxy, or behind our router.


def _by_http(plan: Plan, side: str, kv_memory: int, asked: Sequence[Asked], log: Path) -> Turn:
    """The servers have the options and the cores that those of Isthmus's side have, but for KV events."""
    config = Config.model_validate(config_of(plan, "nixl/round_robin", kv_memory))
    with contextlib.ExitStack() as stack:

        def start(number: int) -> Running:
            server = _server(plan, config, number, stack.enter_context(reserved_port()))
            found = stack.enter_context(running(server, log.with_name(f"{log.name}-{number}.log")))
            asyncio.run(settle(found.pid, cores_of(number, 1)))
            return found

        with ThreadPoolExecutor() as pool:  # they take long to start, and do so at once under Isthmus
            servers = list(pool.map(start, range(plan.prefills + 1)))
        port = stack.enter_context(reserved_port())
        command, path = _proxy(plan, servers, port), "healthcheck"
        if side == ROUTE:
            command, path = _route(plan, servers, port), "health"
        proxy = started(
            f"the {side}", command, log.with_suffix(".log"), partial(_is_up, port, path), start_s=START_S
        )
        url, _ = stack.enter_context(proxy)
        before = [_metrics(each) for each in servers[: plan.prefills]]
        answers = asyncio.run(_ask_all(plan, url, asked))
        after = [_metrics(each) for each in servers[: plan.prefills]]

    def counted(name: str) -> float:
        return sum(serve.total(text, name) for text in after) - sum(serve.total(text, name) for text in before)

    hits, queries = (counted(f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    return Turn(side, kv_memory, hits / max(1.0, queries), answers)


def _server(plan: Plan, config: Config, number: int, meets: int) -> Side:
    """`meets`: the port at which decode servers find it."""
    cores = cores_of(number, 1)
    name = NodeId(f"prefill-{number}")
    spec = LaunchSpec(name, Role.PREFILL, "", "", str(plan.model), 1, "", cores=cores)
    settings = environment_of(config, spec, meets)
    settings["VLLM_API_KEY"] = ""  # the proxy has none
    command = (
        "taskset", "-c", ",".join(map(str, cores)), plan.vllm_python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(plan.model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", "{port}",
        "--block-size", str(plan.block), "--max-model-len", str(plan.max_length), "--enable-prefix-caching",
        "--enable-prompt-tokens-details", "--enforce-eager",
        "--kv-cache-memory-bytes", str(config.engine.kv_memory),
        "--kv-transfer-config", json.dumps(NIXL),
    )  # fmt: skip
    return Side("vLLM", command, settings)


def _proxy(plan: Plan, servers: Sequence[Running], port: int) -> list[str]:
    ports = [each.url.rpartition(":")[2] for each in servers]
    return [
        plan.vllm_python, str(plan.proxy), "--host", "127.0.0.1", "--port", str(port),
        "--prefiller-hosts", *["127.0.0.1"] * plan.prefills, "--prefiller-ports", *ports[: plan.prefills],
        "--decoder-hosts", "127.0.0.1", "--decoder-ports", *ports[plan.prefills :],
    ]  # fmt: skip


def _route(plan: Plan, servers: Sequence[Running], port: int) -> list[str]:
    urls = [each.url for each in servers]
    return [
        sys.executable, "-m", "isthmus", "route", "--port", str(port),
        "--prefill", *urls[: plan.prefills], "--decode", *urls[plan.prefills :],
    ]  # fmt: skip


def _is_up(port: int, path: str) -> str | None:
    url = f"http://127.0.0.1:{port}"
    with contextlib.suppress(httpx.HTTPError):
        if httpx.get(f"{url}/{path}", trust_env=False).status_code == 200:
            return url
    return None


def _metrics(server: Running) -> str:
    return httpx.get(f"{server.url}/metrics", trust_env=False).text


# Asking.


def _warm(plan: Plan) -> list[Asked]:
    rng = random.Random(f"{plan.seed} warm")
    span = range(FIRST_TOKEN, plan.vocabulary)
    return [Asked(0.0, rng.choices(span, k=WARM_TOKENS), ()) for _ in range(WARM)]


async def _ask_all(plan: Plan, url: str, asked: Sequence[Asked], metrics: Path | None = None) -> list[Answer]:
    """After prompts that are not counted; `metrics`: where those of the server are then written."""
    server = serve.Server(url, NAME)
    async with serve.connected(SILENCE_S) as session:
        now = time.perf_counter()
        await serve.together(_ask(plan, session, server, each, now) for each in _warm(plan))
        began = time.perf_counter()
        answers = await serve.together(_ask(plan, session, server, each, began) for each in asked)
        if metrics is not None:
            metrics.write_text(await serve.metrics_of(session, server))
    return answers


async def _ask(
    plan: Plan, session: aiohttp.ClientSession, server: serve.Server, asked: Asked, began: float
) -> Answer:
    row, due = serve.Row(len(asked.prompt), plan.tokens, 1, 1), began + asked.at_s
    body = serve.body_of(server, row, asked.prompt)
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    try:
        stream = serve.read_stream(await serve.ask(session, server, body), row)
    except BenchError as error:
        return Answer(error=str(error))
    details = stream.usage.get("prompt_tokens_details") or {}
    return Answer(stream.token_times_s[0] - due, details.get("cached_tokens"))


# What came of it.


def _times(turn: Turn) -> dict[str, float | int | None]:
    times = [1000 * each.ttft_s for each in turn.answers if not each.error]
    found: dict[str, float | int | None] = dict.fromkeys(("TTFT ms mean", "median", "p90"))
    if len(times) > 1:
        figures = (statistics.mean(times), statistics.median(times), statistics.quantiles(times, n=10)[-1])
        found = dict(zip(found, figures, strict=True))
    return found | {"failed": len(turn.answers) - len(times)}


def table_of(title: str, turns: Sequence[Turn]) -> Sheet:
    rows = [
        {"side": turn.side, "KV MiB of each": turn.kv_memory >> 20, "hit rate": turn.hit_rate} | _times(turn)
        for turn in turns
    ]
    return table(title, {name: name for name in rows[0]}, rows)
