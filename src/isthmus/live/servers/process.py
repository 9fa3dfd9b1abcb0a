"""The adapter: a node whose engine is a vLLM server beside it.

Carries out the decisions of `isthmus.core.node.server_node.ServerNode`: requests over HTTP (`client.py`), blocks
between the server's worker and the store (`pages.py`), blocks between nodes as for any node (`mover.py`). All in one
event loop; only copies of blocks have threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, get_args

from isthmus.core.attempts import Report
from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.errors import StartError
from isthmus.core.node import events
from isthmus.core.node.server_node import ServerNode
from isthmus.core.types import NS_PER_S, PREFILL, Generated, RequestId
from isthmus.live.cluster.process import MemberProcess, NodeOptions, Opener, Runtime
from isthmus.live.cluster.runs import COUNTERS
from isthmus.live.kv.cache import NodeCache, chains_of
from isthmus.live.kv.mover import BlockMover
from isthmus.live.peers import messages
from isthmus.live.servers.client import Client, EngineError, Token, body_of, objection, starts_over
from isthmus.live.servers.kv_events import EventListener, Translator
from isthmus.live.servers.pages import Pages
from isthmus.live.servers.server import Server, ServerSockets

log = logging.getLogger(__name__)

MAX_NAMERS, MAX_SALTS = 64, 10_000
METRICS_S = 10.0
"""How often the server's metrics are read, which takes 15 ms of its time; no decision needs them."""
GONE_S = 5.0
"""How long the process of a server that does not answer may take to end."""
GATHER_S = 0.002
"""How long a token waits at most for others of the same step."""
SALT_BYTES = 16
UNSEALED = "by NIXL: KV goes from engine to engine without seals, so nothing is promised about wrong tokens"
_METRIC = re.compile(
    r"^vllm:(num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)(?:\{[^}]*\})? (\S+)$", re.MULTILINE
)
_DIFFERS = (
    "its vLLM node is gone, and another one, which drew the answer from its beginning, since it has a grammar or "
    "penalties, drew other tokens than those that were sent"
)
_HANDOVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters with which a server keeps a prompt's KV for another server."""


def read_metrics(text: str) -> dict[str, float]:
    """Returns the server's metrics that the node reports, each summed over its labels."""
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


@dataclass(frozen=True)
class ServedEngine:
    """Facts of a running server. `remark`: for operators; `no_grammars`: why it follows none, "" if it does."""

    revision: str
    layout: KVLayout
    num_blocks: int
    max_length: int
    remark: str
    no_grammars: str = ""

    @property
    def layers(self) -> tuple[int, int]:
        """Returns the range of all of the model's layers."""
        return 0, self.layout.num_layers


class AdapterProcess(MemberProcess):
    """The process of a vLLM node. `pages`: serves the connector in mode `pool`; None in mode `nixl`."""

    def __init__(
        self,
        engine: ServedEngine,
        options: NodeOptions,
        runtime: Runtime,
        server: Server,
        sockets: ServerSockets,
        pages: Pages | None,
        store_of: Opener,
    ) -> None:
        store_of, cache_of = store_of if pages is not None else None, partial(NodeCache, engine.layout)
        super().__init__(options, runtime, engine.revision, engine.layout, store_of, cache_of, BlockMover)
        facts, self._engine = options.facts, engine
        self._server, self._sockets, self._pages = server, sockets, pages
        tiers = facts.tiers() if self._cache is not None else None
        self.node = ServerNode(facts.node, facts.role, tiers, transfer_ns=int(options.transfer_s * NS_PER_S))
        self._begun: dict[RequestId, events.StartAttempt] = {}
        self._asked: dict[RequestId, asyncio.Task[None]] = {}
        self._outputs: list[messages.Output] = []
        self._num_answering = 0
        """Streamed answers in progress: each step of the server brings a token of each."""
        self._gathering: asyncio.TimerHandle | None = None
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._num_kv_events_lost = 0
        self._metrics: dict[str, float] = {}
        self._namer = lru_cache(MAX_NAMERS)(self._new_namer)
        self._salts: dict[str, str] = {"": ""}
        """Salts by the digests that the server gets in their place; least recently used first, after ""."""
        self._translator = Translator(self._namer_of, engine.layout.block_size)
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.Submit: self._submit,
            events.Discard: self._begin_discard,
            events.ReleaseResources: self._release,
            events.AdoptBlocks: self._adopt,
            events.Wake: self.wake,
            **dict.fromkeys(get_args(Report), self._report),
        }

    @property
    def _client(self) -> Client:
        return self._server.client

    # Start and end.

    def start(self) -> None:
        self.spawn(self._watch())
        if self._pages is not None:
            assert self._cache is not None
            self._pages.serve(self._cache, self.tell, self.mover.lost_bytes)

    async def _watch(self) -> None:
        """Ends the node with its server. The session with the head ends first, so that no more requests come."""
        reason = "its vLLM server is gone"
        try:
            reason = await self._server.ended()
        finally:
            if self._head is not None:
                self._head.abort(reason)
            self.end(StartError(reason))

    async def _measure(self) -> None:
        while True:
            with contextlib.suppress(EngineError):
                self._metrics = read_metrics((await self._client.get("/metrics")).decode())
            await asyncio.sleep(METRICS_S)

    def hello(self) -> messages.NodeHello:
        engine = self._engine
        return messages.NodeHello(
            messages.PROTOCOL, self._facts.joined(), self._address,
            engine.revision, engine.layout, engine.max_length, remark=engine.remark,
        )  # fmt: skip

    def welcome(self, message: messages.NodeWelcome) -> None:
        super().welcome(message)
        chains = chains_of(self._found)
        if chains:
            self.tell(events.PrefixesRecovered(chains))
        listener = EventListener(self._sockets.kv_events, self._sockets.replay, self._heard_kv, self._void_kv)
        self.spawn(listener.run())
        self.spawn(self._measure())

    def heard(self, message: messages.NodeBound) -> None:
        match message:
            case events.StartAttempt():
                self.begin(message)
            case events.DropAttempt() | events.Convert():
                self.tell(message)
            case _:
                super().heard(message)

    def begin(self, begin: events.StartAttempt) -> None:
        self._begun[begin.key] = begin
        self.tell(begin.to_decide(self._clock_ns()))

    def gauges(self) -> dict[str, float]:
        """As the base; the server's values are up to `METRICS_S` old."""
        num_blocks, metrics = self._facts.kv_blocks, self._metrics
        queued = min(self.node.num_running, int(metrics.get("num_requests_waiting", 0)))
        found: dict[str, float] = {
            "node_requests_running": self.node.num_running - queued,
            "node_requests_waiting": self.node.num_waiting + queued,
            "kv_blocks": num_blocks,
            "kv_blocks_available": round(num_blocks * (1 - metrics.get("kv_cache_usage_perc", 0.0))),
            "kv_blocks_cached": self.node.num_held,
            "kv_blocks_transfer": 0,
            "kv_blocks_hosted": 0,
            "kv_bytes_in_total": 0,
            "kv_bytes_out_total": 0,
            "kv_blocks_evicted_total": self._blocks_evicted,
            "vllm_kv_events_lost_total": self._num_kv_events_lost,
        }
        found |= {f"{name}_total": value for name, value in self._counters.items()}
        found["num_preemptions_total"] = metrics.get("num_preemptions_total", 0.0)
        found |= super().gauges() | self.tenant_gauges(self.node.tiers.sizes() if self.node.tiers else {})
        if self._pages is not None:
            found["vllm_blocks_saved_total"] = self._pages.blocks_saved
            found["vllm_blocks_loaded_total"] = self._pages.blocks_loaded
            found["seal_mismatches_total"] += self._pages.seal_mismatches
        return found

    # Facts and actions.

    def tell(self, fact: events.Event) -> None:
        """Tells the node a fact and carries out its actions, in the event loop. A bug on the way ends the process."""
        try:
            for action in self.node.on(fact, self._clock_ns()):
                handler = self._handlers.get(type(action))
                if handler is not None:
                    handler(action)
                else:
                    self.mover.do(action)
        except BaseException as error:
            self.died(error)
            raise

    fact = tell

    def _report(self, report: Report) -> None:
        self._flush()  # a failure must not overtake tokens
        self.report(report)

    def _adopt(self, adopt: events.AdoptBlocks) -> None:
        if self._pages is None or not self._pages.adopt(adopt):
            self.mover.do(adopt)

    def _release(self, release: events.ReleaseResources) -> None:
        key = release.key
        self._begun.pop(key, None)
        asked = self._asked.pop(key, None)
        if asked is not None and asked is not asyncio.current_task():
            asked.cancel()  # which closes the connection, and vLLM drops it
        self.mover.do(release)

    # Requests.

    def _submit(self, submit: events.Submit) -> None:
        begin = self._begun[submit.key]
        work = self._compute if begin.part is PREFILL else self._answer
        self._asked[submit.key] = self.spawn(self._ask(work, begin, submit))

    async def _ask(self, work: Callable[..., Any], begin: events.StartAttempt, submit: events.Submit) -> None:
        key, sampling = submit.key, begin.sampling
        reason = objection(sampling) or (self._engine.no_grammars if sampling.grammar else "")
        if reason:
            self.tell(events.Broken(key, reason, final=True))
            return
        if self._pages is not None:
            self._pages.begin(key, begin.names)
        tokens = begin.tokens[: begin.num_prompt] if starts_over(sampling) else begin.tokens
        max_tokens = begin.stop_length - len(tokens)
        body = body_of(sampling, tokens, begin.num_prompt, max_tokens) | self._separated(begin.salt)
        params = self._params_of(begin, submit)
        if params is not None:
            body["kv_transfer_params"] = params
        began_ns = self._clock_ns()
        try:
            await work(begin, submit, body)
        except EngineError as error:
            if not error.final and not await self._server.lives():
                await asyncio.sleep(GONE_S)  # this node ends meanwhile: one death costs one attempt
            self._flush()
            self.tell(events.Broken(key, str(error), final=error.final))
        finally:
            self._counters["engine_seconds"] += (self._clock_ns() - began_ns) / NS_PER_S
            if self._asked.get(key) is asyncio.current_task():
                del self._asked[key]

    def _separated(self, salt: str) -> dict[str, str]:
        """Returns vLLM's `cache_salt` for a salt: a digest, so that salts stay in this process."""
        if not salt:
            return {}
        engine = self._engine
        named = hashlib.blake2b(
            salt.encode(), key=engine.revision.encode()[:64], digest_size=SALT_BYTES
        ).hexdigest()
        self._salts[named] = self._salts.pop(named, salt)
        if len(self._salts) > MAX_SALTS:  # the server's blocks of a dropped salt stay unknown
            del self._salts[next(islice(self._salts, 1, None))]  # the first is ""
        return {"cache_salt": named}

    def _params_of(self, begin: events.StartAttempt, submit: events.Submit) -> dict[str, Any] | None:
        """Returns the request's `kv_transfer_params`, orders for the server's connector."""
        if self._pages is not None:
            namer = self._namer(begin.salt)
            own = {"v": 1, "key": submit.key, "blocks": submit.num_blocks, "namer": namer.key.hex()}
            return {"isthmus": own}
        if submit.params:
            params: dict[str, Any] = json.loads(submit.params)
            return params
        return _HANDOVER if begin.part is PREFILL else None

    async def _compute(self, begin: events.StartAttempt, submit: events.Submit, body: dict[str, Any]) -> None:
        """Computes a prompt that another node answers. Its one token is dropped: the decode node samples all."""
        found = await self._client.compute(submit.key, body)
        self._count_prompt(begin, found.cached_tokens)
        own, params = found.params or {}, b""
        if self._pages is None:
            if not own.get("do_remote_prefill"):
                raise EngineError("vLLM did not keep the prompt's KV for another server")
            params = json.dumps(own).encode()
        self.tell(events.EnginePrefilled(submit.key, found.cached_tokens, params))
        if self._pages is not None and not self._pages.connected:
            self.tell(events.SavesDone(submit.key))  # no worker will report it

    async def _answer(self, begin: events.StartAttempt, submit: events.Submit, body: dict[str, Any]) -> None:
        key, said = submit.key, begin.tokens[begin.num_prompt :]
        index = 0 if starts_over(begin.sampling) else len(said)
        first = True
        stream = self._client.answer(key, body, begin.sampling.logprobs)
        try:
            async with contextlib.aclosing(stream):
                async for tokens in stream:
                    for token in tokens:
                        if index >= len(said):
                            self._put(begin, submit, index, token)
                        elif token.token != said[index] or token.finish is not None:
                            raise EngineError(_DIFFERS)
                        index += 1
                    if first:
                        self.tell(events.EnginePrefilled(key))
                        self._flush()  # a first token is sent at once
                        self._num_answering += 1
                        first = False
                    if tokens[-1].finish is not None:
                        self._count_prompt(begin, tokens[-1].cached_tokens or 0)
        finally:
            self._num_answering -= not first
        self._flush()
        self.tell(events.AnswerComplete(key))

    def _put(self, begin: events.StartAttempt, submit: events.Submit, index: int, token: Token) -> None:
        """Outputs a token. Tokens of one step go in one message, which costs the head as much as several tokens."""
        cached = token.cached_tokens
        if cached is not None:
            counted = cached if submit.cached_tokens is None else submit.cached_tokens
            cached = min(counted, begin.num_prompt)
        route = begin.route
        generated = Generated(index, token.token, token.finish, token.logprobs, cached)
        self._outputs.append((route.request, route.attempt, generated))
        self._counters["tokens_sampled"] += 1
        if len(self._outputs) >= self._num_answering:
            self._flush()
        elif self._gathering is None:
            self._gathering = self.loop.call_later(GATHER_S, self._flush)

    def _flush(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._send(messages.Outputs(tuple(outputs)))

    def _count_prompt(self, begin: events.StartAttempt, cached: int) -> None:
        self._counters["prefix_cache_hits"] += min(cached, begin.num_prompt)
        self._counters["prefix_cache_queries"] += begin.num_prompt
        self._counters["tokens_computed"] += max(0, len(begin.tokens) - cached)

    def _begin_discard(self, action: events.Discard) -> None:
        self.spawn(self._discard(action.params))

    async def _discard(self, params: bytes) -> None:
        try:
            await self._client.release(json.loads(params))
        except EngineError as error:
            log.warning("KV that nobody takes stays until its lease ends: %s", error)

    # The server's cache.

    def _new_namer(self, salt: str) -> BlockNamer:
        return BlockNamer(revision=self._engine.revision, layout=self._engine.layout, salt=salt)

    def _namer_of(self, salt: str, adapter: str) -> BlockNamer | None:
        return self._namer(self._salts[salt]) if salt in self._salts and not adapter else None

    def _heard_kv(self, batch: bytes) -> None:
        for fact in self._translator.batch(batch):
            self.tell(fact)

    def _void_kv(self) -> None:
        self._num_kv_events_lost += 1
        for fact in self._translator.clear():
            self.tell(fact)
