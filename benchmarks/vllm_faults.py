"""`python -m benchmarks vllm-faults`: what clients of a cluster of vLLM nodes see while parts of it die.

Some prompts are answered first, undisturbed. Then clients ask them again and again, and faults are done to the cluster
(`breaking.py`) one after the other; whatever comes is compared with those answers, token by token, also of a stream
that ends with an error. At the end nothing may be left: no request, no pinned block, no process. Prompts come again
and half of them begin alike, so blocks are loaded, saved and handed over all the time if the servers' KV memory is too
small for all of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
from typer import Argument, Option

from benchmarks.breaking import FAULTS, KILLS, Cluster
from benchmarks.options import Seed
from isthmus.bench import BenchError, serve
from isthmus.bench.options import WORDS
from isthmus.bench.study import Outcome, Report, plain, silent, table
from isthmus.core.errors import ConfigError, StartError

ALIKE = 0.5
FIRST_TOKEN, VOCABULARY = 3, 250
ANSWER_TOKENS = 32
PATIENCE_S = 150.0
"""A request counts as never ended after this silence."""
AGAIN_S = 300.0
"""The study gives a cluster up that is not healthy again after this time."""
NOTICE_S = 1.0
REFUSED_PAUSE_S = 0.5

ABORT, DISK = "abort", "disk"
KINDS = (*FAULTS, ABORT, DISK)
EXACT, WRONG, ERROR, REFUSED, TWICE, NEVER = "exact", "wrong", "error", "refused", "ended twice", "never ended"
OUTCOMES = (EXACT, WRONG, ERROR, REFUSED, TWICE, NEVER)
FATAL = (WRONG, TWICE, NEVER)
DAMAGE = ("page", DISK)
_SAMPLE = re.compile(r"^isthmus_(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_OWN = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""vLLM's own metrics that are 0 without requests."""


@dataclass(frozen=True)
class Plan:
    url: Annotated[str, Argument(help="URL of a running cluster of vLLM nodes on this machine.")]
    model: Annotated[str, Option(help="What the cluster calls its model.")]
    kinds: Annotated[
        tuple[str, ...], WORDS, Option(help="Kinds of faults, in turn; those joined by + are done at once.")
    ] = (
        "prefill-server+decode-server", "prefill-adapter+decode-adapter", "socket", "link", "head-link", "page",
        "stall", "abort",
    )  # fmt: skip
    count: Annotated[int, Option(min=1, help="How often each is done.")] = 2
    clients: Annotated[int, Option(min=1, help="Requests at a time.")] = 8
    prompts: Annotated[int, Option(min=1, help="Prompts, which are asked again and again.")] = 40
    shortest: Annotated[int, Option(min=1, help="Shortest prompt, in tokens.")] = 5
    longest: Annotated[int, Option(min=2, help="Longest prompt, in tokens.")] = 1500
    pause: Annotated[float, Option(min=0, help="Seconds between faults, about.")] = 3.0
    settle: Annotated[
        float, Option(min=0, help="Seconds that KV may stay after the last request; nixl: its lease of 30.")
    ] = 10.0
    stall: Annotated[float, Option(min=0, help="Seconds for which kind stall stops a process.")] = 2.0
    most: Annotated[float, Option(min=0, help="After so many seconds no fault begins.")] = float("inf")
    disk: Annotated[Path | None, Option(help="Where the nodes keep KV on SSD, for kind disk.")] = None
    seed: Seed = 11

    def __post_init__(self) -> None:
        for kind in [each for group in self.kinds for each in group.split("+")]:
            if kind not in KINDS:
                raise ConfigError(f"--kinds {kind}: known are {', '.join(KINDS)}")
            if kind == DISK and self.disk is None:
                raise ConfigError("--kinds disk: --disk says where the nodes keep KV on SSD")

    @property
    def server(self) -> serve.Server:
        return serve.Server(self.url.rstrip("/"), self.model)


@dataclass
class Row:
    """Observations during faults of one kind. `idle`: faults that found no target."""

    kind: str
    faults: int = 0
    idle: int = 0
    again_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    mismatches: float = 0


@dataclass
class Found:
    """`left`: leftovers that should be gone; `said`: notes on answers that were not exact."""

    rows: list[Row]
    left: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    preemptions: float = 0

    @property
    def is_good(self) -> bool:
        return not self.left and not any(row.outcomes[each] for row in self.rows for each in FATAL)


def prompts_of(plan: Plan) -> list[list[int]]:
    rng = random.Random(plan.seed)
    span = range(FIRST_TOKEN, VOCABULARY)
    shared, found = rng.choices(span, k=plan.longest), []
    for _ in range(plan.prompts):
        length = rng.randrange(plan.shortest, plan.longest)
        alike = rng.randrange(length) if rng.random() < ALIKE else 0
        found.append(shared[:alike] + rng.choices(span, k=length - alike))
    return found


def run(plan: Plan, report: Report = silent) -> Outcome:
    """Kills, cuts and damage in a running cluster of vLLM nodes: every answer is compared, nothing may be left over.

    Raises StartError for a cluster that cannot be looked into, or does not answer before anything is done to it.
    """
    cluster = Cluster(urlsplit(plan.url).port or 80, plan.stall)
    return outcome(plan, asyncio.run(_Campaign(plan, cluster, report).run()))


Judged = tuple[list[int], str, str]
"""Tokens, outcome (EXACT: ended as it should, tokens not compared yet) and note of an answer."""


class _Campaign:
    def __init__(self, plan: Plan, cluster: Cluster, report: Report) -> None:
        self._plan, self._cluster, self._report, self._server = plan, cluster, report, plan.server
        self._prompts, self._rng = prompts_of(plan), random.Random(plan.seed)
        self._answers: list[list[int]] = []
        self._found = Found([Row("none")])
        self._over = False

    @property
    def _row(self) -> Row:
        return self._found.rows[-1]

    async def run(self) -> Found:
        async with serve.connected(PATIENCE_S) as self._http:
            await self._reference()
            clients = [asyncio.create_task(self._client(number)) for number in range(self._plan.clients)]
            try:
                until = time.monotonic() + self._plan.most
                await asyncio.sleep(self._plan.pause)
                while not self._row.outcomes:  # at least one answer without faults
                    await asyncio.sleep(0.01)
                for kind in self._plan.kinds:
                    self._found.rows.append(Row(kind))
                    for number in range(self._plan.count):
                        if time.monotonic() < until:
                            await self._fault(kind, number)
                await self._healthy({})
            finally:
                self._over = True
                await asyncio.gather(*clients)
            await self._settle()
        return self._found

    # What clients see.

    async def _reference(self) -> None:
        asking = map(self._ask, range(len(self._prompts)))
        for tokens, outcome, said in await serve.together(asking, self._plan.clients):
            if outcome != EXACT:
                raise StartError(
                    f"{self._plan.url} does not answer before anything is done to it: {outcome} {said}"
                )
            self._answers.append(tokens)
        self._report(f"{len(self._answers)} answers taken")

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._plan.seed} {number}")
        while not self._over:
            at = rng.randrange(len(self._prompts))
            began = time.monotonic()
            tokens, outcome, said = await self._ask(at)
            if not self._cluster.head.lives:
                return  # `_healthy` says so
            if tokens != self._answers[at][: len(tokens)] or (outcome == EXACT and tokens != self._answers[at]):
                outcome, said = WRONG, f"{tokens}, not {self._answers[at]}; {said}"
            self._row.outcomes[outcome] += 1
            if outcome not in (EXACT, REFUSED):
                took = time.monotonic() - began
                line = f"{self._row.kind}: {outcome} after {len(tokens)} tokens, {took:.1f} s: {said}"
                self._found.said.append(line)
                self._report(f"  {line[:400]}")
            if outcome != EXACT:
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def _ask(self, at: int, capture: serve.Capture | None = None) -> Judged:
        capture = capture or serve.Capture()
        body = {
            "model": self._plan.model, "prompt": self._prompts[at], "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        try:
            await serve.ask(self._http, self._server, json.dumps(body).encode(), capture)
        except serve.Refused as error:
            return [], REFUSED, str(error)
        except BenchError as error:
            return judged(capture)[0], NEVER, str(error)
        return judged(capture)

    async def _abort(self) -> str:
        """Clients that go at random moments, before the first token or later."""
        await asyncio.gather(*[self._go_away() for _ in range(self._plan.clients)])
        return f"{self._plan.clients} clients went away"

    async def _go_away(self) -> None:
        at, capture = self._rng.randrange(len(self._prompts)), serve.Capture()
        asked = asyncio.create_task(self._ask(at, capture))
        await asyncio.wait([asked], timeout=self._rng.random() ** 2 * 5)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        tokens, _, _ = judged(capture)
        if tokens != self._answers[at][: len(tokens)]:
            self._row.outcomes[WRONG] += 1
            self._found.said.append(f"{ABORT}: {tokens}, not {self._answers[at]}")

    # Faults.

    async def _fault(self, group: str, number: int) -> None:
        before, gone = self._cluster.nodes(), dict[str, Any]()
        began, did = time.monotonic(), list[str]()
        mismatches = await self._total("seal_mismatches_total")
        for kind in group.split("+"):
            what = await self._do(kind, number)
            did.append(f"{kind}: {what or 'nothing to be done to'}")
            self._row.faults += bool(what)
            self._row.idle += not what
            if what and kind in KILLS:
                gone |= {name: each for name, each in before.items() if name.startswith(kind.split("-")[0])}
        if any(kind in DAMAGE for kind in group.split("+")):
            await asyncio.sleep(2 * self._plan.pause)
        await asyncio.sleep(NOTICE_S)
        await self._healthy(gone)
        self._row.again_s.append(time.monotonic() - began)
        await asyncio.sleep(self._plan.pause * (0.5 + self._rng.random()))
        found = await self._total("seal_mismatches_total") - mismatches
        self._row.mismatches += max(0, found)  # a node that started again begins at 0
        self._report(
            f"{'; '.join(did)}; healthy after {self._row.again_s[-1]:.1f} s; {dict(self._row.outcomes)}"
        )

    async def _do(self, kind: str, number: int) -> str:
        if kind == ABORT:
            return await self._abort()
        if kind == DISK:
            assert self._plan.disk is not None
            return await asyncio.to_thread(self._cluster.damage_files, self._plan.disk, self._rng)
        return await asyncio.to_thread(FAULTS[kind], self._cluster, number, self._rng)

    async def _healthy(self, gone: dict[str, Any]) -> None:
        """Waits until the cluster is healthy, with new processes in place of `gone`."""
        until, times = time.monotonic() + AGAIN_S, 0
        while times < 2:
            if not self._cluster.head.lives:
                raise StartError(f"the head of {self._plan.url} is gone")
            if time.monotonic() > until:
                raise StartError(f"the cluster is not healthy {AGAIN_S:g} s after a fault")
            nodes = self._cluster.nodes()
            is_well = (
                all(nodes.get(name, each) != each for name, each in gone.items()) and await self._answers_well()
            )
            times = times + 1 if is_well else 0
            await asyncio.sleep(0.25)

    async def _answers_well(self) -> bool:
        try:
            async with self._http.get(f"{self._server.url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    # What is left.

    async def _settle(self) -> None:
        until = time.monotonic() + self._plan.settle
        while True:
            self._found.left = await self._left()
            if not self._found.left or time.monotonic() > until:
                break
            await asyncio.sleep(0.5)
        self._found.preemptions = await self._total("num_preemptions_total")

    async def _left(self) -> list[str]:
        metrics, found = await self._read_metrics(), list[str]()
        for name in ("num_requests_running", "node_requests_running", "node_requests_waiting", "cache_pinned_blocks",
                     "cache_write_queue_blocks", "kv_blocks_transfer", "kv_blocks_hosted"):  # fmt: skip
            found += [f"{node} {name} {value:g}" for node, value in metrics.get(name, {}).items() if value]
        async with self._http.get(f"{self._server.url}/status") as response:
            for each in (await response.json())["nodes"]:
                found += _slots_left(each, metrics["kv_blocks"][each["node"]])
        for node, url in self._cluster.servers().items():  # what nodes say of these is some seconds old
            own = await serve.metrics_of(self._http, serve.Server(url, ""))
            values = {name: serve.total(own, f"vllm:{name}") for name in _OWN}
            found += [f"{node} vllm:{name} {value:g}" for name, value in values.items() if value]
        found += [f"process {each.pid} {each.command[:60]!r}" for each in self._cluster.left_over()]
        return found

    async def _read_metrics(self) -> dict[str, dict[str, float]]:
        """Metrics by name and node; "" for those of the whole cluster."""
        found: dict[str, dict[str, float]] = {}
        for name, labels, value in _SAMPLE.findall(await serve.metrics_of(self._http, self._server)):
            if "," not in labels:
                found.setdefault(name, {})[labels.removeprefix('node="').rstrip('"')] = float(value)
        return found

    async def _total(self, name: str) -> float:
        return serve.total(await serve.metrics_of(self._http, self._server), f"isthmus_{name}")


def _slots_left(node: dict[str, Any], num_blocks: float) -> list[str]:
    """DRAM slots in use that hold no block."""
    memory = next(iter(node["cache"]["tiers"]), None) if node["cache"] else None
    if memory is None:
        return []
    slots = memory["used_bytes"] * num_blocks / node["kv_memory"]["capacity_bytes"]
    lost = round(slots) - memory["blocks"]
    return [f"{node['node']} has {lost} slots in use that are no block's"] if lost else []


def judged(capture: serve.Capture) -> Judged:
    """Tokens and outcome of an answer; the tokens are not compared yet."""
    tokens, finished, done = list[int](), False, False
    for _, data in capture.data():
        if done:
            return tokens, TWICE, f"{data!r} after the end"
        if data == serve.DONE:
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            return tokens, TWICE if finished else ERROR, str(chunk["error"])
        for choice in chunk["choices"]:
            new = choice.get("token_ids") or ()
            if finished and (new or choice["finish_reason"]):
                return tokens, TWICE, f"{choice} after the end"
            tokens += new
            finished = finished or choice["finish_reason"] is not None
    return (tokens, EXACT, "") if finished and done else (tokens, NEVER, "the stream stopped")


def outcome(plan: Plan, found: Found, most: int = 20) -> Outcome:
    title = (
        f"{plan.clients} clients, {plan.shortest} to {plan.longest} tokens, answers of {ANSWER_TOKENS}; "
        f"{found.preemptions:g} pre-emptions at the end; left over: {len(found.left)}"
    )
    rows = [
        {
            "fault": row.kind,
            "done": f"{row.faults}" + (f" ({row.idle} idle)" if row.idle else ""),
            "healthy again, s: median": statistics.median(row.again_s) if row.again_s else None,
            "max": max(row.again_s, default=None),
            **{each: row.outcomes[each] for each in OUTCOMES},
            "seal mismatches": row.mismatches,
        }
        for row in found.rows
    ]
    shown = table(title, {name: name for name in rows[0]}, rows)
    notes = [*[f"left over: {each}" for each in found.left], *found.said[:most]]
    return Outcome([shown], plain([found])[0], notes, found.is_good)
