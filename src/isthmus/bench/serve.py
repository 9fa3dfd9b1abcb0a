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
import math
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.table import Table

from isthmus.bench import BenchError

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0  # the longest wait for the next byte of an answer
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


@dataclass(frozen=True, kw_only=True)
class Result:
    """One server's figures for one row, over all counted rounds.

    Times are in milliseconds, percentiles nearest-rank. TTFT runs from sending a request to its first event
    with tokens. TBT is the gap between an answer's successive events with tokens, however many each carries;
    time per output token is first event to last over the tokens after the first, averaged over requests.
    Rates divide the tokens of good answers by the rounds' wall time; the prefill rate is prompt tokens over
    mean TTFT, at concurrency 1 only. `errors` holds a sentence for each answer left out of the figures.
    `engine_step_ms_mean` is the mean iteration of an Isthmus server's decoding nodes over the same rounds, by
    their own counters, and `overhead_ms_per_token` what a token takes beyond it: node, messenger, gateway, HTTP
    and this generator; both None for other servers. `ratios` is filled in for the first of two servers: its
    metrics divided by the second's.
    """

    url: str
    model: str
    row: Row
    num_requests: int
    errors: tuple[str, ...]
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    tbt_ms_mean: float
    tbt_ms_p50: float
    tbt_ms_p90: float
    tbt_ms_p99: float
    time_per_output_token_ms_mean: float
    output_tokens_per_s: float
    output_tokens_per_s_by_round: tuple[float, ...]
    total_tokens_per_s: float
    prefill_tokens_per_s: float | None
    engine_step_ms_mean: float | None = None
    overhead_ms_per_token: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)


# The metrics that a ratio of two servers is given for: those that every server has.
METRICS = [
    each.name
    for each in dataclasses.fields(Result)
    if each.name.startswith(("ttft_", "tbt_", "time_per_")) or each.name.endswith("_per_s")
]


@dataclass(frozen=True)
class Server:
    """A server to measure, the model asked of it, and the key it wants."""

    url: str
    model: str
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Capture:
    """One answer as it came in: when its request was sent, and when each piece of it was read."""

    sent_s: float
    pieces: list[tuple[float, bytes]]


@dataclass(frozen=True)
class _Stream:
    """One good answer: when its request was sent and when each event with tokens came, in seconds."""

    sent_s: float
    token_times_s: list[float]


@dataclass(frozen=True)
class _Round:
    wall_s: float
    streams: list[_Stream]
    errors: list[str]


def run(
    urls: list[str],
    *,
    model: str | None,
    rows: list[Row],
    rounds: int,
    seed: int,
    keys: Sequence[str | None] = (None, None),
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
    return asyncio.run(
        _run([(url.rstrip("/"), key) for url, key in zip(urls, keys, strict=False)], model, rows, rounds, seed)
    )


@dataclass(frozen=True)
class _Steps:
    """Iterations of a server's decoding nodes and the seconds they took; none for other servers."""

    iterations: float = 0.0
    seconds: float = 0.0

    def since(self, earlier: _Steps) -> _Steps:
        return _Steps(self.iterations - earlier.iterations, self.seconds - earlier.seconds)


async def _steps(session: aiohttp.ClientSession, server: Server) -> _Steps:
    """The counters of an Isthmus server, once they are fresh; no steps for other servers."""
    if "isthmus_engine_seconds_total" not in await _metrics(session, server):
        return _Steps()
    await asyncio.sleep(BEAT_S)
    return _read_steps(await _metrics(session, server))


async def _metrics(session: aiohttp.ClientSession, server: Server) -> str:
    try:
        async with session.get(f"{server.url}/metrics", headers=_headers(server.key)) as response:
            return await response.text(errors="replace") if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _no_answer(server.url, error) from error


def _read_steps(metrics: str) -> _Steps:
    """Sums over the nodes that decode."""

    def total(name: str) -> float:
        pattern = rf'^isthmus_{name}_total{{node="(?:decode|mixed)[^"]*"}} (\S+)$'
        return sum(map(float, re.findall(pattern, metrics, re.MULTILINE)))

    return _Steps(total("iterations"), total("engine_seconds"))


def _with_overhead(result: Result, steps: _Steps) -> Result:
    if not steps.iterations:
        return result
    step_ms = 1000 * steps.seconds / steps.iterations
    overhead = result.time_per_output_token_ms_mean - step_ms
    return dataclasses.replace(result, engine_step_ms_mean=step_ms, overhead_ms_per_token=overhead)


async def _run(
    urls: list[tuple[str, str | None]], model: str | None, rows: list[Row], rounds: int, seed: int
) -> list[Result]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
    results: list[Result] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        servers = [Server(url, model or await ask_model(session, url, key), key) for url, key in urls]
        for row_number, row in enumerate(rows):
            counted: list[list[_Round]] = [[] for _ in servers]
            before: list[_Steps] = []
            for round_number in range(1 + rounds):
                prompts = _prompts(row, f"{seed}/{row_number}/{round_number}")
                if round_number == 1:
                    before = [await _steps(session, server) for server in servers]
                for server, its_rounds in zip(servers, counted, strict=True):
                    one = await _run_round(session, server, row, prompts)
                    if round_number > 0:  # round 0 is the warm-up
                        its_rounds.append(one)
            steps = [(await _steps(session, s)).since(b) for s, b in zip(servers, before, strict=True)]
            found = [_result(s, row, r) for s, r in zip(servers, counted, strict=True)]
            results += _compared([_with_overhead(*each) for each in zip(found, steps, strict=True)])
    return results


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
        raise BenchError(f"{response.url} answered {response.status}: {body}")


def _prompts(row: Row, seed: str) -> list[list[int]]:
    """One prompt per request of a round: random token ids in the byte range, the same for every server."""
    generators = [random.Random(f"{seed}/{index}") for index in range(row.requests)]
    return [list(generator.randbytes(row.prompt_tokens)) for generator in generators]


async def _run_round(
    session: aiohttp.ClientSession, server: Server, row: Row, prompts: list[list[int]]
) -> _Round:
    """Send all prompts, `row.concurrency` at a time, and read the answers once the last has ended."""
    waiting = enumerate([body_of(server, row, prompt) for prompt in prompts])
    captures: dict[int, _Capture] = {}

    async def worker() -> None:
        for index, body in waiting:
            captures[index] = await ask(session, server.url, body, server.key)

    started_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(row.concurrency):
                workers.create_task(worker())
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    wall_s = time.perf_counter() - started_s
    streams: list[_Stream] = []
    errors: list[str] = []
    for index in range(row.requests):
        try:
            streams.append(read_stream(captures[index], row))
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


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, key: str | None = None) -> _Capture:
    """Send one request and keep every piece of its answer; this runs while the server is timed."""
    capture = _Capture(time.perf_counter(), [])
    headers = {"Content-Type": "application/json", **_headers(key)}
    try:
        async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
            await _raise_for_status(response)
            async for piece in response.content.iter_any():
                capture.pieces.append((time.perf_counter(), piece))
    except aiohttp.ClientPayloadError:
        return capture  # cut off part-way: without its usage event, the answer is reported as an error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _no_answer(url, error) from error
    return capture


def _events(capture: _Capture) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON events of an answer, each with the time at which its line was complete."""
    rest = b""
    for read_s, piece in capture.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield read_s, json.loads(line[5:])


def read_stream(capture: _Capture, row: Row) -> _Stream:
    """Decode one answer; raise `BenchError` if it failed or has other token counts than were asked for."""
    events: list[tuple[float, str]] = []  # time and text
    usage: dict[str, int] | None = None
    try:
        for read_s, event in _events(capture):
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
    return _Stream(capture.sent_s, times_s)


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


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile of values in ascending order."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _spread_ms(name: str, times_s: Sequence[float]) -> dict[str, Any]:
    """Mean and percentiles in milliseconds, under the names that `Result` has for them."""
    ordered = sorted(1000 * each for each in times_s)
    percentiles = {f"{name}_ms_p{percent}": _percentile(ordered, percent) for percent in (50, 90, 99)}
    return {f"{name}_ms_mean": statistics.fmean(ordered), **percentiles}


def _result(server: Server, row: Row, rounds: list[_Round]) -> Result:
    """Turn a row's counted rounds into figures; raise `BenchError` if they hold nothing to measure."""
    streams = [stream for each in rounds for stream in each.streams]
    errors = tuple(f"round {n}, {error}" for n, each in enumerate(rounds, 1) for error in each.errors)
    if not streams:
        raise BenchError(f"{server.url} gave no good answer to {row}: {errors[0]}")
    gaps_s = [after - before for s in streams for before, after in itertools.pairwise(s.token_times_s)]
    if not gaps_s:
        raise BenchError(f"{server.url} sends each answer as one event, so token gaps cannot be timed")
    ttfts_s = [stream.token_times_s[0] - stream.sent_s for stream in streams]
    decode_s = statistics.fmean(stream.token_times_s[-1] - stream.token_times_s[0] for stream in streams)
    output_rate = row.output_tokens * len(streams) / sum(each.wall_s for each in rounds)
    return Result(
        url=server.url,
        model=server.model,
        row=row,
        num_requests=len(streams),
        errors=errors,
        **_spread_ms("ttft", ttfts_s),
        **_spread_ms("tbt", gaps_s),
        time_per_output_token_ms_mean=1000 * decode_s / (row.output_tokens - 1),
        output_tokens_per_s=output_rate,
        output_tokens_per_s_by_round=tuple(row.output_tokens * len(r.streams) / r.wall_s for r in rounds),
        total_tokens_per_s=output_rate * (row.prompt_tokens + row.output_tokens) / row.output_tokens,
        prefill_tokens_per_s=row.prompt_tokens / statistics.fmean(ttfts_s) if row.concurrency == 1 else None,
    )


def _compared(results: list[Result]) -> list[Result]:
    """One row's results, the first with its ratios to the second if there are two."""
    if len(results) == 1:
        return results
    first, second = results
    ratios: dict[str, float] = {}
    for name in METRICS:
        over, under = getattr(first, name), getattr(second, name)
        if over is not None and under:
            ratios[name] = over / under
    return [dataclasses.replace(first, ratios=ratios), second]


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    """The results as flat objects of plain JSON values, whose keys are the fields of `Row` and `Result`."""
    plain = [dataclasses.asdict(result) for result in results]
    return [{**each.pop("row"), **each} for each in plain]


# Column headings of the table and the metric each shows.
COLUMNS = {
    "TTFT ms mean": "ttft_ms_mean",
    "p50": "ttft_ms_p50",
    "p99": "ttft_ms_p99",
    "TBT ms mean": "tbt_ms_mean",
    "TBT p50": "tbt_ms_p50",
    "TBT p99": "tbt_ms_p99",
    "ms/token": "time_per_output_token_ms_mean",
    "engine step ms": "engine_step_ms_mean",
    "overhead ms": "overhead_ms_per_token",
    "output tok/s": "output_tokens_per_s",
    "total tok/s": "total_tokens_per_s",
    "prefill tok/s": "prefill_tokens_per_s",
}


def table(results: list[Result]) -> Table:
    """The results as a table, one line each, and a line of ratios under each pair of servers."""
    shown = Table("in/out x conc.", "server", *COLUMNS, "errors", title="isthmus bench serve")
    ratios: dict[str, float] = {}
    for result in results:
        row = result.row
        load = f"{row.prompt_tokens}/{row.output_tokens} x {row.concurrency}"
        figures = [_shown(getattr(result, name)) for name in COLUMNS.values()]
        shown.add_row(load, result.url.split("//")[-1], *figures, str(len(result.errors)))
        if ratios:  # this is the second of two servers, and the first held the ratios
            figures = [_shown(ratios.get(name)) for name in COLUMNS.values()]
            shown.add_row("", "ratio", *figures, "", style="bold")
        ratios = result.ratios
    return shown


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
