"""`python -m benchmarks reuse`: what a cached prefix saves, from a client's request to the first token of its answer.

A live cluster of torch engines with a cache answers pairs of requests: one with a new prefix, which is computed, and
one with a prefix that it has, and another ending. The prefix is in the prefill node's DRAM; on its SSD, after all
processes were ended and started again; or in the DRAM of another node. Both of a pair are asked alone, one after the
other, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
import yaml
from typer import Option

from benchmarks.models import BENCH_MODELS, make_random_model
from benchmarks.options import Rounds, Seed, Threads
from benchmarks.served import served
from isthmus.bench import BenchError, serve
from isthmus.bench.serve import BEAT_S
from isthmus.bench.store import drop_cached
from isthmus.bench.study import Columns, Outcome, Report, silent, table
from isthmus.live.engine.recipe import kv_layout, read_spec

BLOCK_SIZE = 16
OUTPUT_TOKENS = 2
WARM_TOKENS = 512
NUM_WARM = 2
"""Pairs with a short prefix, asked first of every cluster and not counted."""
HEAD_START_S = 0.05
"""So long a prefill node is busy already when the next request is routed to the other."""
WRITTEN_S = 120.0
LOCAL_GBPS = 4000.0
"""What the conductor is told of the link between nodes of this host, which is memory: it then breaks the tie between
having a prefix and fetching it by the order of the nodes, and the third row can be measured on an idle machine."""


START_S = 90.0
COLUMNS: Columns = {
    "prefix in": "source", "computed ms": "first_ms", "cached ms": "again_ms", "ratio": "ratio",
    "aim": lambda row: "" if row["aim"] is None else f">= {row['aim']:g}", "computing": "compute_ms",
    "waiting for KV": "wait_ms", "other": "other_ms",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    model: Annotated[Path | None, Option(help="Model folder; default: the bench model, written now.")] = None
    prefix: Annotated[int, Option(min=BLOCK_SIZE, help="Tokens that two requests have in common.")] = 4000
    suffix: Annotated[int, Option(min=1, help="Tokens of their own.")] = 32
    rounds: Rounds = 5
    threads: Threads = 1
    folder: Annotated[Path | None, Option(help="A folder on the SSD, for the SSD tier.")] = None
    seed: Seed = 0


class Answer(msgspec.Struct, frozen=True):
    """One request. Of `ttft_s` the prefill node's engine ran `engine_s`, `wait_s` of it waiting for cached KV."""

    ttft_s: float
    engine_s: float
    wait_s: float
    cached_tokens: int


Pair = tuple[Answer, Answer]


def run(plan: Plan, report: Report = silent) -> Outcome:
    """Time to first token with a prefix that is cached (DRAM, SSD after a restart, another node) and that is not.

    Starts and ends three clusters, one after another. Raises BenchError.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-reuse-", dir=plan.folder) as name:
        return _Bench(plan, Path(name), report).run()


class _Bench:
    """`home`: for the model, the configuration, the SSD tier and the log of the servers."""

    def __init__(self, plan: Plan, home: Path, report: Report) -> None:
        self._plan, self._home, self._report = plan, home, report
        if plan.model is None:
            self._model = home / "model"
            make_random_model(self._model, **BENCH_MODELS["llama-512x12"], dtype="bfloat16")
        else:
            self._model = plan.model.resolve()
        spec = read_spec(self._model)
        if spec.max_length < self._num_tokens + OUTPUT_TOKENS:
            raise BenchError(f"{self._model} takes {spec.max_length} tokens, fewer than the prompts have")
        self._layout = kv_layout(spec, spec.dtype, BLOCK_SIZE)

    @property
    def _num_tokens(self) -> int:
        return self._plan.prefix + self._plan.suffix

    @property
    def _num_blocks(self) -> int:
        """Whole blocks of a prefix."""
        return self._plan.prefix // BLOCK_SIZE

    def run(self) -> Outcome:
        one_of_each = self._write_config("pair", {"prefill": 1, "decode": 1}, on_disk=True)
        two_prefill = self._write_config("trio", {"prefill": 2, "decode": 1}, on_disk=False)
        numbers, num_blocks = range(self._plan.rounds), self._plan.rounds * self._num_blocks

        async def in_memory(client: Client) -> list[Pair]:
            pairs = [await self._pair(client, "DRAM", f"pair/{at}", f"pair/{at}", "again") for at in numbers]
            self._report("waiting until the SSD tier is written")
            await client.until("cache_disk_blocks", num_blocks, WRITTEN_S)
            await client.until("cache_write_queue_blocks", 0, WRITTEN_S)
            return pairs

        async def on_disk(client: Client) -> list[Pair]:
            await client.until("cache_disk_blocks", num_blocks, START_S)
            return [
                await self._pair(client, "SSD", f"restarted/{at}", f"pair/{at}", "restarted") for at in numbers
            ]

        async def elsewhere(client: Client) -> list[Pair]:
            return [await self._pair_elsewhere(client, at) for at in numbers]

        rows = [row_of("DRAM", self._asked(one_of_each, in_memory), 4.0)]
        drop_cached(path for path in (self._home / "blocks").rglob("*") if path.is_file())
        rows.append(row_of("SSD, after a restart", self._asked(one_of_each, on_disk), 2.0))
        rows.append(row_of("another node's DRAM", self._asked(two_prefill, elsewhere), None))
        found: dict[str, Any] = {"prefix_tokens": self._plan.prefix, "suffix_tokens": self._plan.suffix}
        found |= {"prefix_bytes": self._num_blocks * self._layout.block_bytes, "rows": rows}
        title = (
            f"python -m benchmarks reuse: TTFT with a prefix of {self._plan.prefix} tokens "
            f"({found['prefix_bytes'] / 1e6:.0f} MB), {self._plan.suffix} after it"
        )
        notes = [
            f"medians of {self._plan.rounds} pairs, each of requests alone; the SSD tier was read cold",
            "computing, waiting, other: parts of the cached request's time; other is HTTP, tokenizer, conductor, "
            "sessions",
        ]
        return Outcome([table(title, COLUMNS, rows)], found, notes)

    def _asked(self, config: Path, ask: Callable[[Client], Awaitable[list[Pair]]]) -> list[Pair]:
        """Of a cluster that runs for so long."""

        async def asked(url: str) -> list[Pair]:
            async with self._client(url) as client:
                return await ask(client)

        with served(config, self._home / "serve.log", START_S) as (url, _):
            return asyncio.run(asked(url))

    # The pairs. Prefixes are told apart by name: each is asked for as often as its row needs.

    async def _pair(self, client: Client, source: str, new: str, known: str, suffix: str) -> Pair:
        """`new`, `known`: prefixes that are not cached, and that are; the latter has this suffix."""
        first = await client.ask(self._prompt(new, "first"))
        return self._told(source, (first, await client.ask(self._prompt(known, suffix))))

    async def _pair_elsewhere(self, client: Client, index: int) -> Pair:
        """Idle nodes are taken in the order in which they joined. The first is kept busy while the prefix comes, which
        is computed by the second, and asked for by the first when all is quiet."""
        first = await client.ask(self._prompt(f"quiet/{index}", "first"))
        busy = asyncio.create_task(client.answer(self._prompt(f"busy/{index}", "first")))
        await asyncio.sleep(HEAD_START_S)
        await client.answer(self._prompt(f"elsewhere/{index}", "first"))
        await busy
        moved = await client.total("kv_bytes_borrowed_total")
        again = await client.ask(self._prompt(f"elsewhere/{index}", "again"))
        if await client.total("kv_bytes_borrowed_total") == moved:
            raise BenchError("the prefix was not taken from another node; is the machine busy?")
        return self._told("another node", (first, again))

    def _told(self, source: str, pair: Pair) -> Pair:
        first, again = pair
        self._report(
            f"{source}: {1000 * first.ttft_s:.1f} ms computed, {1000 * again.ttft_s:.1f} ms with the prefix"
        )
        if first.cached_tokens or again.cached_tokens < self._num_blocks * BLOCK_SIZE:
            found = f"{first.cached_tokens} and {again.cached_tokens}"
            raise BenchError(f"{found} tokens of the pair's prompts were cached, not 0 and the prefix")
        return pair

    def _prompt(self, prefix: str, suffix: str) -> list[int]:
        return self._tokens(prefix, self._plan.prefix) + self._tokens(f"{prefix}/{suffix}", self._plan.suffix)

    def _tokens(self, name: str, count: int) -> list[int]:
        return list(random.Random(f"{self._plan.seed}/{name}").randbytes(count))

    # The clusters.

    def _write_config(self, name: str, roles: dict[str, int], *, on_disk: bool) -> Path:
        """A deployment whose caches hold every prompt."""
        prompts = 4 * self._plan.rounds + 2 * NUM_WARM
        size = prompts * self._layout.blocks_for(self._num_tokens + OUTPUT_TOKENS) * self._layout.block_bytes
        cache: dict[str, Any] = {"dram": size}
        if on_disk:
            cache |= {"ssd": 2 * size, "folder": str(self._home / "blocks")}
        values = {
            "model": str(self._model),
            "port": 0,
            "roles": roles,
            "policy": "mooncake",
            "engine": {"threads": self._plan.threads, "block_size": BLOCK_SIZE},
            "cache": cache,
            "network": {"node_gbps": LOCAL_GBPS},
        }
        path = self._home / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    @contextlib.asynccontextmanager
    async def _client(self, url: str) -> AsyncIterator[Client]:
        """Of a cluster that is warm."""
        async with serve.connected() as session:
            client = Client(session, serve.Server(url, await serve.ask_model(session, url)))
            start = random.randbytes(8).hex()  # not in the cache of an earlier cluster
            for index in range(NUM_WARM):
                prefix = self._tokens(f"{start}/{index}", min(WARM_TOKENS, self._plan.prefix))
                for suffix in ("first", "again"):
                    await client.answer(prefix + self._tokens(suffix, self._plan.suffix))
            yield client


class Client:
    """Asks one cluster, and reads its metrics."""

    def __init__(self, session: aiohttp.ClientSession, server: serve.Server) -> None:
        self._session, self._server = session, server

    async def answer(self, prompt: list[int]) -> tuple[float, int]:
        """TTFT in seconds, and how many tokens of the prompt were cached."""
        row = serve.Row(len(prompt), OUTPUT_TOKENS, 1, 1)
        body = serve.body_of(self._server, row, prompt)
        stream = serve.read_stream(await serve.ask(self._session, self._server, body), row)
        cached = stream.usage["prompt_tokens_details"]["cached_tokens"]
        return stream.token_times_s[0] - stream.sent_s, int(cached)

    async def ask(self, prompt: list[int]) -> Answer:
        """One request alone, and what the prefill nodes' counters say of it."""
        await asyncio.sleep(BEAT_S)
        counters = ("engine_seconds_total", "kv_wait_seconds_total")
        before = [await self.total(name) for name in counters]
        ttft_s, cached = await self.answer(prompt)
        await asyncio.sleep(BEAT_S)
        engine_s, wait_s = [
            await self.total(name) - early for name, early in zip(counters, before, strict=True)
        ]
        return Answer(ttft_s, engine_s, wait_s, cached)

    async def total(self, name: str) -> float:
        """A metric's sum over the prefill nodes."""
        return serve.total(await serve.metrics_of(self._session, self._server), f"isthmus_{name}", "prefill")

    async def until(self, name: str, value: float, limit_s: float) -> None:
        """Waits until a metric's sum is at least `value`; for 0, until it is 0."""
        found = await self.total(name)
        try:
            async with asyncio.timeout(limit_s):
                while found < value or (found > 0 and not value):
                    await asyncio.sleep(0.1)
                    found = await self.total(name)
        except TimeoutError:
            raise BenchError(f"{name} is {found:g}, not {value:g}, after {limit_s:g} s") from None


def row_of(source: str, pairs: Sequence[Pair], aim: float | None) -> dict[str, Any]:
    """One place of the prefix; medians over the rounds, in ms, and of the ratios of the pairs.

    Of `again_ms`: `compute_ms` in the engine, `wait_ms` where it waited for KV, `other_ms` outside of it (client,
    HTTP, tokenizer, conductor, sessions, scheduler). `aim`: of `ratio`, None if there is none.
    """
    firsts, agains = [first for first, _ in pairs], [again for _, again in pairs]
    ratios = [first.ttft_s / again.ttft_s for first, again in pairs]
    return {
        "source": source,
        "cached_tokens": min([again.cached_tokens for again in agains]),
        "first_ms": _median_ms([first.ttft_s for first in firsts]),
        "again_ms": _median_ms([again.ttft_s for again in agains]),
        "ratio": statistics.median(ratios),
        "aim": aim,
        "compute_ms": _median_ms([again.engine_s - again.wait_s for again in agains]),
        "wait_ms": _median_ms([again.wait_s for again in agains]),
        "other_ms": _median_ms([again.ttft_s - again.engine_s for again in agains]),
        "ratios": ratios,
    }


def _median_ms(values_s: Sequence[float]) -> float:
    return 1000 * statistics.median(values_s)
