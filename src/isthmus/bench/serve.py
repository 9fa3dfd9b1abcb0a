"""The load generator behind `isthmus bench serve`: times one OpenAI-compatible server, or two in turns.

Owns the prompts, the clock readings and the figures made from them. Knows servers only by URL: it talks to
`POST /v1/completions` with streaming on, and to `GET /v1/models` when no model is named.

The generator shares its cores with the servers it times. While a round runs, each piece read from a socket is
stored with its time and nothing else; events are found and decoded after the round's last stream has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from isthmus.bench import BenchError
from isthmus.bench.study import Outcome, Report, silent, table
from isthmus.lab.sim.spread import nearest_rank

Value = TypeVar("Value")

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0  # the longest wait for the next byte of an answer
DONE = b"[DONE]"
BEAT_S = 0.7  # an Isthmus node reports its counters at least this often


@dataclass(frozen=True)
class Row:
    """One load: `requests` per round, `concurrency` at a time, each of the given prompt and output tokens."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.concurrency, self.requests) < 1 or self.output_tokens < 2:
            raise BenchError(f"{self}: counts must be at least 1, output_tokens at least 2")


DEFAULT_ROWS = [
    Row(prompt_tokens=64, output_tokens=128, concurrency=1, requests=8),
    Row(prompt_tokens=64, output_tokens=128, concurrency=8, requests=32),
    Row(prompt_tokens=64, output_tokens=128, concurrency=16, requests=64),
    Row(prompt_tokens=512, output_tokens=64, concurrency=16, requests=48),
    Row(prompt_tokens=3500, output_tokens=16, concurrency=1, requests=5),
]


Result = dict[str, Any]
"""One server's figures for one row, over all counted rounds; its keys are those of the JSON.

Times are in milliseconds, percentiles nearest-rank. TTFT runs from sending a request to its first event
with tokens. TBT is the gap between an answer's successive events with tokens, however many each carries;
time per output token is first event to last over the tokens after the first, averaged over requests.
Rates divide the tokens of good answers by the rounds' wall time; the prefill rate is prompt tokens over
mean TTFT, at concurrency 1 only. `errors` holds a sentence for each answer left out of the figures.
`engine_step_ms_mean` is the mean iteration of an Isthmus server's decoding nodes over the same rounds, by
their own counters, and `overhead_ms_per_token` what a token takes beyond it: node, messenger, gateway, HTTP
and this generator; both None for other servers. For the first of two servers, `ratios` are its metrics divided
by the second's, and `other_texts` is how many of its answers have another text than the second's.
"""
PERCENTILES = (50, 90, 99)
METRICS = [
    f"{name}_ms_{which}"
    for name in ("ttft", "tbt")
    for which in ("mean", *[f"p{each}" for each in PERCENTILES])
]
METRICS += [
    "time_per_output_token_ms_mean",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "prefill_tokens_per_s",
]
"""Metrics with a ratio of two servers: every server has them."""


@dataclass(frozen=True)
class Server:
    """A server to measure, the model asked of it, and the key it wants."""

    url: str
    model: str
    key: str | None = field(default=None, repr=False)


class Refused(BenchError):
    """A server answered with another status than 200."""


@dataclass
class Capture:
    """One answer as it comes in: when its request was sent, and when each piece of it was read."""

    sent_s: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def data(self) -> Iterator[tuple[float, bytes]]:
        """Data of the server-sent events, each with the time at which its line was complete."""
        rest = b""
        for read_s, piece in self.pieces:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield read_s, line[5:].strip()

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Events that are JSON."""
        for read_s, data in self.data():
            if data != DONE:
                yield read_s, json.loads(data)


@dataclass(frozen=True)
class Stream:
    """One good answer: when its request was sent and when each event with tokens came, in seconds; `text`, `usage`."""

    sent_s: float
    token_times_s: list[float]
    text: str
    usage: dict[str, Any]


@dataclass(frozen=True)
class _Round:
    wall_s: float
    streams: dict[int, Stream]
    errors: list[str]


def run(
    urls: list[str],
    *,
    model: str | None,
    rows: list[Row],
    rounds: int,
    seed: int,
    keys: Sequence[str | None] = (None, None),
    report: Report = silent,
) -> list[Result]:
    """Time one or two servers and return a result for each row and server, in that order.

    Each row has one warm-up round and then `rounds` counted ones. In each round the first server takes the
    load, then the second takes the same prompts, so that neither works while the other is timed. Prompts
    follow from seed, row, round and position and do not repeat within a run. A server that was timed before
    and has a prefix cache needs another seed, or it finds its prompts in the cache. `keys`: of each server.
    """
    if len(urls) not in (1, 2):
        raise BenchError(f"one or two servers can be timed, not {len(urls)}")
    if rounds < 1 or not rows:
        raise BenchError("at least one row and one counted round are needed")

    async def measure() -> list[Result]:
        results: list[Result] = []
        async with connected() as session:
            asked = [(url.rstrip("/"), key) for url, key in zip(urls, keys, strict=False)]
            servers = [Server(url, model or await ask_model(session, url, key), key) for url, key in asked]
            for number, row in enumerate(rows):
                results += await _measure_row(session, servers, row, rounds, f"{seed}/{number}")
                rates = ", ".join(
                    f"{each['output_tokens_per_s']:.1f} tokens/s" for each in results[-len(servers) :]
                )
                report(f"{_load(results[-1])}: {rates}")
        return results

    return asyncio.run(measure())


async def _steps(session: aiohttp.ClientSession, server: Server) -> tuple[float, float]:
    """Iterations of an Isthmus server's decoding nodes and their seconds, once its counters are fresh; (0, 0) for other
    servers."""
    names = ("isthmus_iterations_total", "isthmus_engine_seconds_total")
    if names[1] not in await metrics_of(session, server):
        return 0.0, 0.0
    await asyncio.sleep(BEAT_S)
    metrics = await metrics_of(session, server)
    iterations, seconds = (total(metrics, name, "decode", "mixed") for name in names)
    return iterations, seconds


async def metrics_of(session: aiohttp.ClientSession, server: Server) -> str:
    """Prometheus text; empty for a server that has none."""
    try:
        async with session.get(f"{server.url}/metrics", headers=_headers(server.key)) as response:
            return await response.text(errors="replace") if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _no_answer(server.url, error) from error


def total(metrics: str, name: str, *nodes: str) -> float:
    """A metric's sum over all labels, or over nodes whose names begin in one of these ways."""
    which = rf'\{{(?:.*,)?node="(?:{"|".join(nodes)})[^}}]*\}}' if nodes else r"(?:\{[^}]*\})?"
    return sum(map(float, re.findall(rf"^{name}{which} (\S+)$", metrics, re.MULTILINE)))


def connected(silence_s: float = SILENCE_TIMEOUT_S) -> aiohttp.ClientSession:
    """A session for as many requests at once as there are."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def together(works: Iterable[Coroutine[Any, Any, Value]], at_once: int | None = None) -> list[Value]:
    """Runs coroutines, `at_once` at a time, and returns their results in order. The first to fail ends the others."""
    left = list(works)
    waiting, found = enumerate(left), dict[int, Value]()

    async def worker() -> None:
        for at, work in waiting:
            found[at] = await work

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(len(left) if at_once is None else at_once):
                group.create_task(worker())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        for _, work in waiting:  # whose turn does not come
            work.close()
    return [found[at] for at in sorted(found)]


async def _measure_row(
    session: aiohttp.ClientSession, servers: Sequence[Server], row: Row, rounds: int, seed: str
) -> list[Result]:
    """A result of each server."""
    counted: list[list[_Round]] = [[] for _ in servers]
    for number in range(1 + rounds):
        prompts = _prompts(row, f"{seed}/{number}")
        if number == 1:  # round 0 is the warm-up
            before = [await _steps(session, server) for server in servers]
        for server, its_rounds in zip(servers, counted, strict=True):
            its_rounds.append(await _run_round(session, server, row, prompts))
    after = [await _steps(session, server) for server in servers]
    found = [
        _result(server, row, its_rounds[1:], (late[0] - early[0], late[1] - early[1]))
        for server, its_rounds, early, late in zip(servers, counted, before, after, strict=True)
    ]
    if len(found) == 2:
        found[0] |= _compared(found, [its_rounds[1:] for its_rounds in counted])
    return found


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def ask_model(session: aiohttp.ClientSession, url: str, key: str | None = None) -> str:
    """The first model that a server lists. Raises BenchError."""
    try:
        async with session.get(f"{url}/v1/models", headers=_headers(key)) as response:
            await _raise_for_status(response)
            listed: dict[str, Any] = await response.json()
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _no_answer(url, error) from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url}/v1/models names no model") from error


def _no_answer(url: str, error: Exception) -> BenchError:
    return BenchError(f"{url} does not answer: {type(error).__name__}: {error}")


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        body = (await response.text(errors="replace"))[:300]
        raise Refused(f"{response.url} answered {response.status}: {body}")


def _prompts(row: Row, seed: str) -> list[list[int]]:
    """Prompts of a round: random token ids in the byte range, the same for every server."""
    generators = [random.Random(f"{seed}/{index}") for index in range(row.requests)]
    return [list(generator.randbytes(row.prompt_tokens)) for generator in generators]


async def _run_round(
    session: aiohttp.ClientSession, server: Server, row: Row, prompts: list[list[int]]
) -> _Round:
    """Send all prompts, `row.concurrency` at a time, and read the answers once the last has ended."""
    bodies = [body_of(server, row, prompt) for prompt in prompts]
    started_s = time.perf_counter()
    captures = await together((ask(session, server, body) for body in bodies), row.concurrency)
    wall_s = time.perf_counter() - started_s
    streams: dict[int, Stream] = {}
    errors: list[str] = []
    for index, capture in enumerate(captures):
        try:
            streams[index] = read_stream(capture, row)
        except BenchError as error:
            errors.append(f"request {index}: {error}")
    return _Round(wall_s, streams, errors)


def body_of(server: Server, row: Row, prompt: list[int]) -> bytes:
    """A streaming completion request that ends at the row's output length."""
    request = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": row.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request).encode()


async def ask(
    session: aiohttp.ClientSession, server: Server, body: bytes, capture: Capture | None = None
) -> Capture:
    """Sends one request and keeps every piece of its answer; this runs while the server is timed."""
    capture = capture or Capture()
    capture.sent_s = time.perf_counter()
    headers = {"Content-Type": "application/json", **_headers(server.key)}
    try:
        async with session.post(f"{server.url}/v1/completions", data=body, headers=headers) as response:
            await _raise_for_status(response)
            async for piece in response.content.iter_any():
                capture.pieces.append((time.perf_counter(), piece))
    except aiohttp.ClientPayloadError:
        return capture  # cut off part-way: without its usage event, the answer is reported as an error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _no_answer(server.url, error) from error
    return capture


def read_stream(capture: Capture, row: Row) -> Stream:
    """Decode one answer; raise `BenchError` if it failed or has other token counts than were asked for."""
    events: list[tuple[float, str]] = []  # time and text
    usage: dict[str, Any] | None = None
    try:
        for read_s, event in capture.events():
            if "error" in event:
                raise BenchError(f"the server sent an error: {event['error']}")
            usage = event.get("usage") or usage
            events += [(read_s, choice["text"]) for choice in event["choices"]]
        if usage is None:
            raise BenchError(f"the stream ended without usage, after {len(events)} events")
        counts = usage["prompt_tokens"], usage["completion_tokens"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BenchError(f"the stream holds an event that cannot be read: {error!r}") from error
    if counts != (row.prompt_tokens, row.output_tokens):
        wanted = f"{row.prompt_tokens} prompt and {row.output_tokens} output tokens"
        raise BenchError(f"usage says {counts[0]} prompt and {counts[1]} output tokens, asked for {wanted}")
    times_s = _token_times_s(events, row.output_tokens)
    if not times_s:
        raise BenchError("the stream holds no event with tokens")
    return Stream(capture.sent_s, times_s, "".join(text for _, text in events), usage)


def _token_times_s(events: list[tuple[float, str]], num_tokens: int) -> list[float]:
    """When the events with tokens came, out of (time, text) pairs of which some may hold none.

    A token may have no text yet (half a character), so lack of text alone proves nothing. Only if there are
    more events than tokens is the closing one left out, and if that is not enough, all others without text.
    """
    if len(events) > num_tokens and not events[-1][1]:
        events = events[:-1]
    if len(events) > num_tokens:
        events = [(read_s, text) for read_s, text in events if text]
    return [read_s for read_s, _ in events]


def _spread_ms(name: str, times_s: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds."""
    ordered = sorted(1000 * each for each in times_s)
    percentiles = {f"{name}_ms_p{percent}": nearest_rank(ordered, percent) for percent in PERCENTILES}
    return {f"{name}_ms_mean": statistics.fmean(ordered), **percentiles}


def _result(server: Server, row: Row, rounds: list[_Round], steps: tuple[float, float]) -> Result:
    """Turn a row's counted rounds into figures; raise `BenchError` if they hold nothing to measure."""
    streams = [stream for each in rounds for stream in each.streams.values()]
    errors = [f"round {n}, {error}" for n, each in enumerate(rounds, 1) for error in each.errors]
    if not streams:
        raise BenchError(f"{server.url} gave no good answer to {row}: {errors[0]}")
    gaps_s = [after - before for s in streams for before, after in itertools.pairwise(s.token_times_s)]
    if not gaps_s:
        raise BenchError(f"{server.url} sends each answer as one event, so token gaps cannot be timed")
    ttfts_s = [stream.token_times_s[0] - stream.sent_s for stream in streams]
    decode_s = statistics.fmean(stream.token_times_s[-1] - stream.token_times_s[0] for stream in streams)
    output_rate = row.output_tokens * len(streams) / sum(each.wall_s for each in rounds)
    token_ms = 1000 * decode_s / (row.output_tokens - 1)
    step_ms = 1000 * steps[1] / steps[0] if steps[0] else None
    return {
        **dataclasses.asdict(row),
        "url": server.url,
        "model": server.model,
        "num_requests": len(streams),
        "errors": errors,
        **_spread_ms("ttft", ttfts_s),
        **_spread_ms("tbt", gaps_s),
        "time_per_output_token_ms_mean": token_ms,
        "output_tokens_per_s": output_rate,
        "output_tokens_per_s_by_round": [row.output_tokens * len(r.streams) / r.wall_s for r in rounds],
        "total_tokens_per_s": output_rate * (row.prompt_tokens + row.output_tokens) / row.output_tokens,
        "prefill_tokens_per_s": row.prompt_tokens / statistics.fmean(ttfts_s) if row.concurrency == 1 else None,
        "engine_step_ms_mean": step_ms,
        "overhead_ms_per_token": None if step_ms is None else token_ms - step_ms,
        "ratios": {},
        "other_texts": None,
    }


def _compared(results: list[Result], rounds: Sequence[Sequence[_Round]]) -> dict[str, Any]:
    """Ratios and differing answers, for the first of two results."""
    first, second = results
    ratios = {name: first[name] / second[name] for name in METRICS if first[name] is not None and second[name]}
    pairs = [(one.streams, other.streams) for one, other in zip(*rounds, strict=True)]
    others = sum(one[at].text != other[at].text for one, other in pairs for at in one.keys() & other.keys())
    return {"ratios": ratios, "other_texts": others}


COLUMNS = {
    "in/out x conc.": "load", "server": "server", "TTFT ms mean": "ttft_ms_mean", "p50": "ttft_ms_p50",
    "p99": "ttft_ms_p99", "TBT ms mean": "tbt_ms_mean", "TBT p50": "tbt_ms_p50", "TBT p99": "tbt_ms_p99",
    "ms/token": "time_per_output_token_ms_mean", "engine step ms": "engine_step_ms_mean",
    "overhead ms": "overhead_ms_per_token", "output tok/s": "output_tokens_per_s", "total tok/s": "total_tokens_per_s",
    "prefill tok/s": "prefill_tokens_per_s", "errors": "num_errors", "other texts": "other_texts",
}  # fmt: skip


def outcome(results: Sequence[Result]) -> Outcome:
    """A line for each result, and one of ratios under each pair of servers."""
    lines: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for result in results:
        server = result["url"].split("//")[-1]
        lines.append(result | {"load": _load(result), "server": server, "num_errors": len(result["errors"])})
        if ratios:  # this is the second of two servers, and the first held the ratios
            lines.append({"load": "", "server": "ratio", **ratios})
        ratios = result["ratios"]
    return Outcome([table("isthmus bench serve", COLUMNS, lines)], list(results))


def _load(result: Result) -> str:
    return f"{result['prompt_tokens']}/{result['output_tokens']} x {result['concurrency']}"
