"""`python -m benchmarks route`: routers before servers of OpenAI's API, each with the same loads before fake servers.

A fake server (`benchmarks.paced_server`) has a set pace and an LRU of blocks. A router's mistakes show in what is
cached where a prompt comes, and its own work in the time of a hop and of a processor. Each router starts afresh for
each load, before servers that have nothing cached; routers take turns. Beside them stand `direct`, where the client
chooses the server itself (as if it knew all caches, where that counts), and `round-robin`, where it takes them in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
import uvloop
from typer import Option

from benchmarks import route_loads
from benchmarks.options import Seed
from benchmarks.paced import Pace
from benchmarks.route_client import Client, Reply
from benchmarks.route_faults import KILLS, REPEATS, Faults, faults, killable
from benchmarks.route_loads import Conversations, Cost, Exact, InTurn, Row, Way
from benchmarks.served import reserved_port, started
from isthmus.bench import BenchError
from isthmus.bench.options import WORDS, WORDS_OF_SHELL, Rounds, one_of
from isthmus.bench.study import Outcome, Report, in_turns, plain, said, silent, table
from isthmus.core.errors import ConfigError, StartError
from isthmus.sheet import Sheet

Found = TypeVar("Found")

MODEL = Pace.model
SERVERS = {"cost": 2, "turns": 4, "trace": 4, "faults": 4}
"""Each load, with so many servers."""
KEY = "sk-nobody"
START_S, SETTLE_S = 60.0, 1.0
TRACE_BLOCKS, TURNS_BLOCKS = 8_000, 384
TRACE_SHRINK, TRACE_SPEED = 8, 4.0


@dataclass(frozen=True)
class Peer:
    """How a router is started: `{port}`, `{second_port}` (for its metrics) and `{config}` (a file that `config` writes)
    stand for theirs in the command, and `{urls}` for the URLs of the servers, an argument each."""

    command: str
    settings: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Sequence[str]], Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def _of_litellm(urls: Sequence[str]) -> Any:
    servers = [{"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"} for url in urls]
    return {
        "model_list": [{"model_name": MODEL, "litellm_params": each} for each in servers],
        "general_settings": {"master_key": KEY},
    }


RUST = "--worker-urls {urls} --host 127.0.0.1 --port {port} --prometheus-port {second_port}"
PEERS = {
    "vllm-router": Peer(f"vllm-router {RUST} --policy cache_aware"),
    "vllm-router-in-turn": Peer(f"vllm-router {RUST} --policy round_robin"),
    "sglang-router": Peer(f"sglang-router launch {RUST} --policy cache_aware"),
    "smg": Peer(f"smg launch {RUST} --policy cache_aware"),
    "smg-prefix-hash": Peer(f"smg launch {RUST} --policy prefix_hash"),
    "litellm": Peer(
        "litellm --config {config} --host 127.0.0.1 --port {port}",
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"},
        _of_litellm,
        {"authorization": f"Bearer {KEY}"},
    ),
    "isthmus": Peer(f"{sys.executable} -u -m isthmus route {{urls}} --port {{port}}"),
}
"""With their default policies where the name says no other; servers are told on the command line."""
DIRECT, IN_TURN = "direct", "round-robin"
"""No router: the client chooses."""
DEFAULT = ("vllm-router", "sglang-router", "smg", "litellm", "isthmus", DIRECT, IN_TURN)


@dataclass(frozen=True)
class Plan:
    folder: Annotated[Path, Option(help="Where logs are kept.")]
    peers: Annotated[
        tuple[str, ...], WORDS, Option(help=f"Known are {', '.join([*PEERS, DIRECT, IN_TURN])}.")
    ] = DEFAULT
    peers_bin: Annotated[Path | None, Option(help="Where the routers' programs are; default: the PATH.")] = None
    loads: Annotated[tuple[str, ...], WORDS, Option(help=f"Of {', '.join(SERVERS)}.")] = ("cost", "turns")
    trace: Annotated[
        Path | None, Option(help="Mooncake's trace of conversations, for the load of that name.")
    ] = None
    rows: Annotated[int, Option(min=2, help="Of the trace.")] = 400
    conversations: Annotated[int, Option(min=1, help="Of the load turns.")] = 60
    think_s: Annotated[float, Option(min=0, help="Mean pause of a conversation after an answer.")] = 0.3
    seconds: Annotated[float, Option(min=0.01, help="Of each part of the load cost.")] = 3.0
    isthmus_options: Annotated[
        tuple[str, ...],
        WORDS_OF_SHELL,
        Option(help="More options of isthmus route, e.g. '--policy least_loaded'."),
    ] = ()
    rounds: Rounds = 1
    seed: Seed = 1

    def __post_init__(self) -> None:
        for peer in self.peers:
            one_of([*PEERS, DIRECT, IN_TURN], "--peers", peer)
        for load in self.loads:
            one_of(SERVERS, "--loads", load)
        if "trace" in self.loads and self.trace is None:
            raise ConfigError("--trace: the load of that name needs a file")


class Hits(msgspec.Struct, frozen=True):
    """`rate`: cached prompt tokens over prompt tokens, as the servers counted them."""

    rate: float
    mean_ms: float
    p99_ms: float
    requests: int


class Turn(msgspec.Struct, frozen=True):
    """One peer with one load. `ready_s`: from its start to its first answer; `rss_mib`: after the load."""

    found: Cost | Hits | Faults
    ready_s: float | None = None
    rss_mib: float | None = None


def run(plan: Plan, report: Report = silent) -> Outcome:
    """Routers before OpenAI-compatible servers: what a hop costs, hit rates and TTFT of conversations and a trace."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    rows = (
        []
        if plan.trace is None
        else route_loads.rows_of(plan.trace, plan.rows, shrink=TRACE_SHRINK, speed=TRACE_SPEED)
    )
    peers = [peer for peer in plan.peers if _is_there(plan, peer, report)]
    sides = {
        (load, peer): partial(_tried, plan, load, peer, rows, report)
        for load in plan.loads
        for peer in peers
        if (load, peer) != ("cost", IN_TURN) and (load != "faults" or peer in PEERS)
    }
    found = in_turns(sides, plan.rounds, warm_up=False)
    medians = [_median(load, peer, [turn for turn in turns if turn]) for (load, peer), turns in found.items()]
    notes = [f"{len(os.sched_getaffinity(0))} cores, shared by the load, the servers and the router"]
    if rows:
        notes.append(f"one server that forgets nothing would hit {route_loads.endless(rows):.3f} of the trace")
    return Outcome(_tables(plan, medians), {"rows": medians, "turns": _plain_turns(found)}, notes)


def _plain_turns(found: Mapping[tuple[str, str], Sequence[Turn | None]]) -> list[Any]:
    return [
        {"load": load, "peer": peer, "turns": plain([turn for turn in turns if turn])}
        for (load, peer), turns in found.items()
    ]


def _is_there(plan: Plan, peer: str, report: Report) -> bool:
    if peer in (DIRECT, IN_TURN):
        return True
    if peer == "isthmus":
        asked = subprocess.run([sys.executable, "-m", "isthmus", "route", "--help"], capture_output=True)
        is_there = asked.returncode == 0
    else:
        is_there = _program(plan, PEERS[peer].command.split()[0]) is not None
    if not is_there:
        report(f"{peer} is left out: it is not installed")
    return is_there


def _program(plan: Plan, name: str) -> str | None:
    return shutil.which(name, path=None if plan.peers_bin is None else str(plan.peers_bin.resolve()))


# A turn.


def _tried(plan: Plan, load: str, peer: str, rows: Sequence[Row], report: Report) -> Turn | None:
    """A peer that fails is said and has no figure; the others go on."""
    try:
        turn = _turn(plan, load, peer, rows)
    except (StartError, BenchError) as error:
        report(f"{load}, {peer}: {error}")
        return None
    row = {name: each for name, each in msgspec.structs.asdict(turn.found).items() if each is not None}
    report(f"{load}, {peer}: {said(row)}")
    return turn


def _turn(plan: Plan, load: str, peer: str, rows: Sequence[Row]) -> Turn:
    if load == "faults":
        return _faulty_turn(plan, peer)
    with contextlib.ExitStack() as stack:
        urls = stack.enter_context(_servers(plan, load))
        if peer in (DIRECT, IN_TURN):
            clients = [Client(url, MODEL) for url in urls]
            is_exact = peer == DIRECT and load != "cost"
            way: Way = Exact(clients, _pace(load).blocks) if is_exact else InTurn(clients)
            return Turn(_measured(plan, load, way, urls, rows, lambda: None))
        url, pid, ready_s = stack.enter_context(_router(plan, load, peer, urls))
        time.sleep(SETTLE_S)  # some learn of their servers a little later
        way = InTurn([Client(url, MODEL, dict(PEERS[peer].headers))])
        found = _measured(plan, load, way, urls, rows, lambda: usage(pid)[0])
        return Turn(found, ready_s, usage(pid)[1])


def _faulty_turn(plan: Plan, peer: str) -> Turn:
    """The router is started twice, before the same servers."""
    with killable(SERVERS["faults"], _options(_pace("faults")), plan.folder) as servers:
        urls = [server.url for server in servers]
        with contextlib.ExitStack() as second, contextlib.ExitStack() as first:

            def began(stack: contextlib.ExitStack) -> tuple[Client, float]:
                url, _, ready_s = stack.enter_context(_router(plan, "faults", peer, urls))
                time.sleep(SETTLE_S)
                return Client(url, MODEL, dict(PEERS[peer].headers), {"temperature": 0}), ready_s

            def again() -> Client:
                first.close()
                return began(second)[0]

            client, ready_s = began(first)
            return Turn(uvloop.run(faults(client, servers, again, plan.seed)), ready_s, None)


def _measured(
    plan: Plan, load: str, way: Way, urls: Sequence[str], rows: Sequence[Row], cpu_s: Callable[[], float | None]
) -> Cost | Hits:
    if load == "cost":
        return uvloop.run(_closing(way, route_loads.cost(way, plan.seconds, cpu_s)))
    before = _counted(urls)
    if load == "turns":
        talks = Conversations(num=plan.conversations, think_s=plan.think_s, seed=plan.seed)
        replies = uvloop.run(_closing(way, route_loads.turns(way, talks)))
    else:
        replies = uvloop.run(_closing(way, route_loads.trace(way, rows)))
    hits, queries = (after - was for after, was in zip(_counted(urls), before, strict=True))
    return _hits(hits / max(1.0, queries), replies)


async def _closing(way: Way, load: Awaitable[Found]) -> Found:
    """An event loop that ends with open connections may never end."""
    try:
        return await load
    finally:
        await way.close()


def _hits(rate: float, replies: Sequence[Reply]) -> Hits:
    ttfts = sorted([each.ttft_s * 1e3 for each in replies])
    return Hits(rate, statistics.mean(ttfts), ttfts[min(len(ttfts) - 1, len(ttfts) * 99 // 100)], len(ttfts))


def _counted(urls: Sequence[str]) -> tuple[float, float]:
    """Cached prompt tokens and prompt tokens of all servers since they started."""
    texts = [httpx.get(f"{url}/metrics", trust_env=False).text for url in urls]
    hits, queries = (
        sum(
            [
                float(re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.M)[0])
                for text in texts
            ]
        )
        for name in ("hits", "queries")
    )
    return hits, queries


# Processes.


def _pace(load: str) -> Pace:
    """Where the cost of a hop is measured, a prefill takes no time."""
    if load == "cost":
        return Pace(blocks=100_000, prefill_us=0)
    if load == "faults":
        return Pace(blocks=100_000, token_ms=20)
    return Pace(blocks=TURNS_BLOCKS if load == "turns" else TRACE_BLOCKS)


def _options(pace: Pace) -> list[str]:
    options = ("--blocks", pace.blocks, "--prefill-us", pace.prefill_us, "--token-ms", pace.token_ms)
    return [str(each) for each in options]


@contextlib.contextmanager
def _servers(plan: Plan, load: str) -> Iterator[list[str]]:
    """The URLs of fresh servers for one load."""
    command = (sys.executable, "-m", "benchmarks.paced_server", *_options(_pace(load)))

    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(number: int) -> str:
            log = plan.folder / f"server-{number}.log"
            return stack.enter_context(started("a server", command, log, partial(_url_in, log)))[0]

        yield list(pool.map(start, range(SERVERS[load])))


def _url_in(log: Path) -> str | None:
    found = re.search(r"^paced at (\S+)\n", log.read_text())
    return found[1] if found else None


@contextlib.contextmanager
def _router(plan: Plan, load: str, peer: str, urls: Sequence[str]) -> Iterator[tuple[str, int, float]]:
    """URL, process id and the seconds until it answered a prompt."""
    how, config = PEERS[peer], plan.folder / f"{peer}.json"
    if how.config is not None:
        config.write_text(json.dumps(how.config(urls)))
    with (
        reserved_port() as port,
        reserved_port() as second_port,
        httpx.Client(trust_env=False, timeout=10) as http,
    ):
        words = {"port": str(port), "second_port": str(second_port), "config": str(config)}
        command = [part for word in how.command.split() for part in _filled(word, words, urls)]
        command[0] = _program(plan, command[0]) or command[0]
        if peer == "isthmus":
            command += plan.isthmus_options
        url, begin = f"http://127.0.0.1:{port}", time.monotonic()
        ready = partial(_answers, http, url, how.headers)
        log = plan.folder / f"{peer}-{load}.log"
        with started(peer, command, log, ready, settings=how.settings, start_s=START_S) as (_, pid):
            yield url, pid, time.monotonic() - begin


def _filled(word: str, words: Mapping[str, str], urls: Sequence[str]) -> Sequence[str]:
    return urls if word == "{urls}" else [word.format(**words) if word.startswith("{") else word]


def _answers(http: httpx.Client, url: str, headers: Mapping[str, str]) -> bool | None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    try:
        answer = http.post(f"{url}/v1/chat/completions", json=chat, headers=dict(headers))
    except httpx.HTTPError:
        return None
    return True if answer.status_code == 200 else None


def usage(pid: int) -> tuple[float, float]:
    """Processor seconds and resident MiB of a process that began a session, and of all its descendants there."""
    ticks = pages = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == pid:
            ticks += sum(map(int, fields[11:15]))  # of children that have ended, too
            pages += int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGESIZE") / (1 << 20)


# Figures.


def _median(load: str, peer: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """One row: the medians over the rounds of all that was measured."""
    row: dict[str, Any] = {"load": load, "peer": peer}
    flat = [
        {**msgspec.structs.asdict(turn.found), "ready_s": turn.ready_s, "rss_mib": turn.rss_mib}
        for turn in turns
    ]
    for name in flat[0] if flat else ():
        values = [each[name] for each in flat if each[name] is not None]
        row[name] = statistics.median(values) if values else None
    return row


COST = {
    "TTFT ms at 1": "ttft_1_ms",
    "at 8": "ttft_8_ms",
    "requests/s at 64": "requests_per_s",
    "CPU ms a request": "request_cpu_ms",
    f"CPU ms a stream of {route_loads.STREAM_TOKENS}": "stream_cpu_ms",
    "RSS MiB": "rss_mib",
    "ready s": "ready_s",
}
HITS = {
    "hit rate": "rate",
    "mean TTFT ms": "mean_ms",
    "P99 ms": "p99_ms",
    "requests": "requests",
    "RSS MiB": "rss_mib",
}


FAULTS = {
    "whole": "whole",
    "error told": "told",
    "cut": "cut",
    "wrong": "wrong",
    "longest s": "longest_s",
    "back s": "back_s",
    "slow: mean TTFT ms": "slow_ttft_ms",
    "left s": "left_s",
    "again s": "again_s",
    f"repeats of {REPEATS}": "repeats",
}


def _tables(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> list[Sheet]:
    titles = {
        "cost": f"Cost before {SERVERS['cost']} servers whose prefill takes no time",
        "turns": f"{plan.conversations} conversations on {SERVERS['turns']} servers of {TURNS_BLOCKS} blocks",
        "trace": f"{plan.rows} requests of a trace on {SERVERS['trace']} servers of {TRACE_BLOCKS:,} blocks",
        "faults": f"{KILLS} kills of {SERVERS['faults']} servers under load, a slow server, a restart of the router",
    }
    sheets = []
    for load in plan.loads:
        columns = {"cost": COST, "faults": FAULTS}.get(load, HITS)
        mine = [row for row in rows if row["load"] == load]
        sources = {head: _source(key) for head, key in columns.items()}
        sheets.append(table(titles[load], {"router": "peer", **sources}, mine))
    return sheets


def _source(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """A figure of a row; a peer that failed has none."""
    return lambda row: row.get(name)
