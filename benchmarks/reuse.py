"""`python -m benchmarks reuse`: what a cached prefix saves, from a client's request to the first token of its answer.

A live cluster of torch engines with a cache answers pairs of requests: one with a new prefix, which is computed, and
one with a prefix that it has, and another ending. The prefix is in the prefill node's DRAM; on its SSD, after all
processes were ended and started again; or in the DRAM of another node. Both of a pair are asked alone, one after the
other, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from rich.table import Table

from benchmarks.models import BENCH_MODELS, make_random_model
from benchmarks.served import START_S, served
from isthmus.bench import BenchError, serve
from isthmus.bench.serve import BEAT_S
from isthmus.core.blocks import KVLayout
from isthmus.live.engine.spec import read_spec

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


class Plan(msgspec.Struct, frozen=True):
    """`model`: its folder, None writes the bench model; `folder`: where the SSD tier lies, None takes the folder of
    temporary files; `threads`: of each node."""

    model: Path | None = None
    prefix_tokens: int = 4000
    suffix_tokens: int = 32
    rounds: int = 5
    threads: int = 1
    seed: int = 0
    folder: Path | None = None


class Answer(msgspec.Struct, frozen=True):
    """One request. Of `ttft_s` the prefill node's engine ran `engine_s`, `wait_s` of it waiting for cached KV."""

    ttft_s: float
    engine_s: float
    wait_s: float
    cached_tokens: int


class Row(msgspec.Struct, frozen=True):
    """One place of the prefix; medians over the rounds, in ms, and of the ratios of the pairs.

    Of `again_ms`: `compute_ms` in the engine, `wait_ms` where it waited for KV, `other_ms` outside of it (client,
    HTTP, tokenizer, conductor, sessions, scheduler). `aim`: of `ratio`, None if there is none.
    """

    source: str
    cached_tokens: int
    first_ms: float
    again_ms: float
    ratio: float
    aim: float | None
    compute_ms: float
    wait_ms: float
    other_ms: float
    ratios: tuple[float, ...]


class Reuse(msgspec.Struct, frozen=True):
    """`cold`: the files of the SSD tier were dropped from the page cache before the restart."""

    prefix_tokens: int
    suffix_tokens: int
    prefix_bytes: int
    cold: bool
    rows: list[Row]


Pair = tuple[Answer, Answer]


def run(plan: Plan, report: Callable[[str], None] = lambda line: None) -> Reuse:
    """Starts and ends three clusters, one after another. Raises BenchError."""
    if min(plan.prefix_tokens // BLOCK_SIZE, plan.suffix_tokens, plan.rounds) < 1:
        raise BenchError(f"a prefix of at least {BLOCK_SIZE} tokens, a suffix and a round are needed")
    with tempfile.TemporaryDirectory(prefix="isthmus-reuse-", dir=plan.folder) as name:
        home = Path(name)
        return asyncio.run(_Bench(plan, home, report).run())


class _Bench:
    """`home`: for the model, the configuration, the SSD tier and the log of the servers."""

    def __init__(self, plan: Plan, home: Path, report: Callable[[str], None]) -> None:
        self._plan, self._home, self._report = plan, home, report
        if plan.model is None:
            self._model = home / "model"
            make_random_model(self._model, **BENCH_MODELS["llama-512x12"], dtype="bfloat16")
        else:
            self._model = plan.model.resolve()
        spec = read_spec(self._model)
        if spec.max_length < self._num_tokens + OUTPUT_TOKENS:
            raise BenchError(f"{self._model} takes {spec.max_length} tokens, fewer than the prompts have")
        self._layout = KVLayout(
            dtype=spec.dtype,
            block_size=BLOCK_SIZE,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )

    @property
    def _num_tokens(self) -> int:
        return self._plan.prefix_tokens + self._plan.suffix_tokens

    @property
    def _num_blocks(self) -> int:
        """Whole blocks of a prefix."""
        return self._plan.prefix_tokens // BLOCK_SIZE

    async def run(self) -> Reuse:
        one_of_each = self._write_config("pair", {"prefill": 1, "decode": 1}, on_disk=True)
        async with self._cluster(one_of_each) as client:
            in_memory = [await self._pair_in_memory(client, index) for index in range(self._plan.rounds)]
            await self._await_written(client)
        cold = drop_from_page_cache(self._home / "blocks")
        async with self._cluster(one_of_each) as client:
            await client.until("cache_disk_blocks", self._plan.rounds * self._num_blocks, START_S)
            on_disk = [await self._pair_on_disk(client, index) for index in range(self._plan.rounds)]
        two_prefill = self._write_config("trio", {"prefill": 2, "decode": 1}, on_disk=False)
        async with self._cluster(two_prefill) as client:
            elsewhere = [await self._pair_elsewhere(client, index) for index in range(self._plan.rounds)]
        rows = [
            row_of("DRAM", in_memory, 4.0),
            row_of("SSD, after a restart", on_disk, 2.0),
            row_of("another node's DRAM", elsewhere, None),
        ]
        size = self._num_blocks * self._layout.block_bytes
        return Reuse(self._plan.prefix_tokens, self._plan.suffix_tokens, size, cold, rows)

    # The pairs. Prefixes are told apart by name: each is asked for as often as its row needs.

    async def _pair_in_memory(self, client: Client, index: int) -> Pair:
        first = await client.ask(self._prompt(f"pair/{index}", "first"))
        return self._told("DRAM", (first, await client.ask(self._prompt(f"pair/{index}", "again"))))

    async def _pair_on_disk(self, client: Client, index: int) -> Pair:
        first = await client.ask(self._prompt(f"restarted/{index}", "first"))
        return self._told("SSD", (first, await client.ask(self._prompt(f"pair/{index}", "restarted"))))

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
        return self._tokens(prefix, self._plan.prefix_tokens) + self._tokens(
            f"{prefix}/{suffix}", self._plan.suffix_tokens
        )

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
    async def _cluster(self, config: Path) -> AsyncIterator[Client]:
        """A running cluster, warm."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
        async with (
            served(config, self._home / "serve.log") as (url, _),
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            client = Client(session, serve.Server(url, await serve.ask_model(session, url)))
            start = random.randbytes(8).hex()  # not in the cache of an earlier cluster
            for index in range(NUM_WARM):
                prefix = self._tokens(f"{start}/{index}", min(WARM_TOKENS, self._plan.prefix_tokens))
                for suffix in ("first", "again"):
                    await client.answer(prefix + self._tokens(suffix, self._plan.suffix_tokens))
            yield client

    async def _await_written(self, client: Client) -> None:
        self._report("waiting until the SSD tier is written")
        await client.until("cache_disk_blocks", self._plan.rounds * self._num_blocks, WRITTEN_S)
        await client.until("cache_write_queue_blocks", 0, WRITTEN_S)


class Client:
    """Asks one cluster, and reads its metrics."""

    def __init__(self, session: aiohttp.ClientSession, server: serve.Server) -> None:
        self._session, self._server = session, server

    async def answer(self, prompt: list[int]) -> tuple[float, int]:
        """TTFT in seconds, and how many tokens of the prompt were cached."""
        row = serve.Row(len(prompt), OUTPUT_TOKENS, 1, 1)
        capture = await serve.ask(self._session, self._server.url, serve.body_of(self._server, row, prompt))
        stream = serve.read_stream(capture, row)
        cached = re.search(rb'"cached_tokens":\s*(\d+)', b"".join([piece for _, piece in capture.pieces]))
        if cached is None:
            raise BenchError("the usage does not say how many tokens were cached")
        return stream.token_times_s[0] - stream.sent_s, int(cached[1])

    async def ask(self, prompt: list[int]) -> Answer:
        """One request alone, and what the prefill nodes' counters say of it."""
        await asyncio.sleep(BEAT_S)
        before = await self._prefill_seconds()
        ttft_s, cached = await self.answer(prompt)
        await asyncio.sleep(BEAT_S)
        engine_s, wait_s = (
            late - early for late, early in zip(await self._prefill_seconds(), before, strict=True)
        )
        return Answer(ttft_s, engine_s, wait_s, cached)

    async def _prefill_seconds(self) -> tuple[float, float]:
        return await self.total("engine_seconds_total"), await self.total("kv_wait_seconds_total")

    async def total(self, name: str) -> float:
        """A metric's sum over the prefill nodes."""
        async with self._session.get(f"{self._server.url}/metrics") as response:
            text = await response.text()
        values = re.findall(rf'^isthmus_{name}{{node="prefill[^"]*"}} (\S+)$', text, re.MULTILINE)
        return sum(map(float, values))

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


def drop_from_page_cache(folder: Path) -> bool:
    """Of all files in a folder; False where the system has no call for it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)  # what is yet to be written stays in memory
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
    return True


def row_of(source: str, pairs: Sequence[Pair], aim: float | None) -> Row:
    firsts, agains = [first for first, _ in pairs], [again for _, again in pairs]
    ratios = tuple([first.ttft_s / again.ttft_s for first, again in pairs])
    return Row(
        source=source,
        cached_tokens=min([again.cached_tokens for again in agains]),
        first_ms=_median_ms([first.ttft_s for first in firsts]),
        again_ms=_median_ms([again.ttft_s for again in agains]),
        ratio=statistics.median(ratios),
        aim=aim,
        compute_ms=_median_ms([again.engine_s - again.wait_s for again in agains]),
        wait_ms=_median_ms([again.wait_s for again in agains]),
        other_ms=_median_ms([again.ttft_s - again.engine_s for again in agains]),
        ratios=ratios,
    )


def _median_ms(values_s: Sequence[float]) -> float:
    return 1000 * statistics.median(values_s)


def table(found: Reuse) -> Table:
    size = found.prefix_bytes / 1e6
    title = f"python -m benchmarks reuse: TTFT with a prefix of {found.prefix_tokens} tokens ({size:.0f} MB), "
    shown = Table(title=title + f"{found.suffix_tokens} after it")
    for head in (
        "prefix in",
        "computed ms",
        "cached ms",
        "ratio",
        "aim",
        "computing",
        "waiting for KV",
        "other",
    ):
        shown.add_column(head, justify="left" if head == "prefix in" else "right")
    for row in found.rows:
        parts = [f"{part:.1f}" for part in (row.compute_ms, row.wait_ms, row.other_ms)]
        aim = "" if row.aim is None else f">= {row.aim:g}"
        shown.add_row(row.source, f"{row.first_ms:.1f}", f"{row.again_ms:.1f}", f"{row.ratio:.1f}", aim, *parts)
    return shown


def summary_lines(found: Reuse) -> list[str]:
    state = (
        "dropped from the page cache before the restart" if found.cold else "perhaps still in the page cache"
    )
    return [
        f"the SSD tier's files were {state}; medians of {len(found.rows[0].ratios)} pairs, each of requests alone",
        "computing, waiting, other: parts of the cached request's time; other is HTTP, tokenizer, conductor, sessions",
    ]


def as_json(found: Reuse) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(found)
    return values
