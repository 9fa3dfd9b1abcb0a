"""A vLLM server that computes nothing and keeps vLLM 0.32's rules, as far as a node beside it sees them.

Its greedy token is a digest of all tokens so far. KV of a block is a digest of the tokens up to its end, repeated: who
goes on with other KV answers other tokens, with HTTP 200, as vLLM does. In mode `pool` the connector's own planner and
worker move it; between engines a request to the other server stands for NIXL's read.

`python -m vllm.entrypoints.openai.api_server` runs `main` where `stand_in` made a folder for PYTHONPATH. Each server
writes down where it is in the folder `FAKE_VLLM`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import secrets
import signal
import socket
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy
import zmq
import zmq.asyncio
from aiohttp import web

from benchmarks.served import reserved_port

REPLAY_END = (1 << 64) - 1
STEP_S = 0.001
WAITING, LOADING, READY, OVER = "waiting", "loading", "ready", "over"


def digest(tokens: list[int], salt: str = "") -> bytes:
    return hashlib.blake2b(salt.encode() + b"/" + array("I", tokens).tobytes(), digest_size=16).digest()


def next_token(tokens: list[int]) -> int:
    return 1 + int.from_bytes(digest(tokens)[:4], "little") % 250


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Publisher:
    """vLLM's `ZmqEventPublisher`, as far as others see it: it publishes, and says again what it has `kept`. Tests may
    let it lose batches, and hold its answers (`answers`, `may_answer`). `asked`: from which number on it was asked."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.endpoint, self.replay = endpoint, replay
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._out, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self._out.bind(endpoint)
        self._router.bind(replay)
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self.answers = True
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def subscribed(self) -> None:
        """Somebody hears what is said from now on."""
        assert await self._out.recv() == b"\x01"

    def say(self, number: int, payload: bytes, *, lost: bool = False, keep: bool = True) -> None:
        if keep:
            self.kept[number] = payload
        if not lost:
            self._out.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def serve(self) -> None:
        while True:
            await self.may_answer.wait()
            who, _, first = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if not self.answers:
                continue
            for number in sorted(self.kept):
                if number >= self.asked[-1]:
                    await self._router.send_multipart([who, b"", number.to_bytes(8, "big"), self.kept[number]])
            await self._router.send_multipart([who, b"", REPLAY_END.to_bytes(8, "big"), b""])

    def close(self) -> None:
        self._out.close(linger=0)
        self._router.close(linger=0)
        self._context.destroy(linger=0)


@dataclass
class Request:
    name: str
    body: dict[str, Any]
    tokens: list[int]
    max_tokens: int
    salt: str
    state: str = WAITING
    cached: int = 0
    loaded: int = 0
    right: bool = True
    blocks: list[int] = field(default_factory=list)
    out: asyncio.Queue[tuple[int, str | None]] = field(default_factory=asyncio.Queue)
    num_prompt: int = 0
    matcher: Any = None
    """Of its grammar."""

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}


class Engine:
    """Takes one step after the other, in each a token of each request. Blocks are in one pool: what was computed stays
    until its room is needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size = options, options.block_size
        config = json.loads((Path(options.model) / "config.json").read_text())
        self.max_length = (
            options.max_model_len if (options.max_model_len or 0) > 0 else config["max_position_embeddings"]
        )
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        width = 4 if options.dtype == "float32" else 2
        page = self.size * 2 * config["num_key_value_heads"] * head * width
        layers = config["num_hidden_layers"]
        self.num_blocks = options.kv_cache_memory_bytes // (page * layers)
        self.layers = [numpy.zeros((self.num_blocks, page), numpy.uint8) for _ in range(layers)]
        given = json.loads(options.kv_events_config)
        self.publisher = Publisher(given["endpoint"], given["replay_endpoint"])
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.token_s = 0.0
        self.drifts = False
        self.requests: dict[str, Request] = {}
        self.kept: dict[str, tuple[bytes, int, float]] = {}
        """What another engine is to read: what it is, its blocks, and until when."""
        self.session: aiohttp.ClientSession
        self._seed = secrets.token_bytes(8)
        self._free = list(range(self.num_blocks))
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._used: Counter[int] = Counter()
        self._filling: dict[str, list[int]] = {}
        """Blocks of requests that ended while theirs were loaded."""
        self._said: list[dict[str, Any]] = []
        self._work, self._tasks = asyncio.Event(), set[asyncio.Task[None]]()
        self.ends = (config["eos_token_id"],)
        self._tokenizer: Any = None
        self.planner: Any = None
        transfer = json.loads(options.kv_transfer_config)
        if transfer["kv_connector"] == "IsthmusConnector":
            self._connect(transfer["kv_connector_extra_config"]["socket"])

    def _connect(self, path: str) -> None:
        import torch

        from isthmus_vllm.pages import pages_of
        from isthmus_vllm.plans import Planner
        from isthmus_vllm.worker import Worker

        pages = pages_of([torch.from_numpy(layer) for layer in self.layers], self.num_blocks)
        self.worker = Worker(
            path,
            pages,
            form="fake",
            model=self.options.model,
            block_size=self.size,
            staging_bytes=1 << 22,
            timeout_s=90,
        )
        self.planner = Planner(self.size, self._used.update, self._used.subtract)

    def matcher_of(self, grammar: str) -> Any:
        """As vLLM's back end `guidance`. Raises ValueError."""
        from llguidance import LLMatcher, LLTokenizer, grammar_from

        if self.options.grammars == "refused":
            raise ValueError("made to fail")
        if self.options.grammars == "ignored":
            return None
        if self._tokenizer is None:
            text = (Path(self.options.model) / "tokenizer.json").read_text()
            self._tokenizer = LLTokenizer(text, None, list(self.ends))
        matcher = LLMatcher(self._tokenizer, grammar_from("grammar", grammar), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    @property
    def num_used(self) -> int:
        """Blocks of requests, and those that are kept for other engines."""
        mine = {block for request in self.requests.values() for block in request.blocks}
        return len(mine) + sum(count for _, count, _ in self.kept.values())

    @property
    def num_saving(self) -> int:
        """What its connector has to do, and blocks that the adapter has not fetched."""
        return 0 if self.planner is None else self.planner.has_work + len(self.worker._slots._taken)

    def begin(self, request: Request) -> None:
        self.requests[request.name] = request
        if self.planner is not None:
            from isthmus_vllm.plans import ticket_of

            ticket = ticket_of(request.params)
            if ticket is not None:
                self.planner.begin(request.name, *ticket, request.tokens)
        self._work.set()

    def end(self, request: Request) -> None:
        """As in vLLM, blocks that a load may still write to stay taken until its outcome is known."""
        was, request.state = request.state, OVER
        if was in (WAITING, LOADING) and request.params.get("do_remote_prefill"):
            self._in_background(self.let_go(request.params))
        if self.requests.pop(request.name, None) is not None:
            if was == LOADING and self.planner is not None:
                self._filling[request.name] = request.blocks
            else:
                self._used.subtract(request.blocks)
            if self.planner is not None:
                self.planner.finished(request.name)
            self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._step()
            await asyncio.sleep(self.token_s or STEP_S)
            if not self.requests and not (self.planner is not None and self.planner.has_work):
                self._work.clear()

    def _step(self) -> None:
        self._outcomes()
        stepped = []
        for request in list(self.requests.values()):
            if request.state == WAITING and self._has_room(request):
                self._admit(request)
            if request.state == READY:
                self._forward(request)
                stepped.append(request)
        if self.planner is not None:
            from isthmus_vllm.plans import Scheduled

            facts = [Scheduled(each.name, len(each.tokens), len(each.tokens) // self.size) for each in stepped]
            plan = self.planner.step(facts, lambda name: self.requests[name].blocks)
            self.worker.load(plan)
            self.worker.save(plan)
        if self._said:
            self.publisher.say(len(self.publisher.kept), msgspec.msgpack.encode([time.time(), self._said, 0]))
            self._said = []
        for request in stepped:
            self._sample(request)

    def _outcomes(self) -> None:
        if self.planner is None:
            return
        self.planner.reported(self.worker.take_report(), time.monotonic())
        for name, whole in self.worker.take_outcomes().items():
            self.planner.loaded(name, whole=whole)
            self._used.subtract(self._filling.pop(name, ()))
            request = self.requests.get(name)
            if request is None:
                continue
            request.state = READY
            if whole:
                self._loaded(request, request.cached, request.cached + request.loaded)
            else:
                self.counts["loads_failed"] += 1

    def _loaded(self, request: Request, start: int, stop: int) -> None:
        """The KV of these tokens came from elsewhere: what is computed with it is as right as it is."""
        for at in range(start // self.size, stop // self.size):
            content, block = self._content(request, at), request.blocks[at]
            if any(bytes(layer[block]) != content * (len(layer[block]) // 16) for layer in self.layers):
                request.right = False
                self.counts["wrong_blocks"] += 1
        self.counts["blocks_loaded"] += (stop - start) // self.size
        request.cached = stop

    def _content(self, request: Request, at: int) -> bytes:
        return digest(request.tokens[: (at + 1) * self.size], request.salt)

    def _hash(self, request: Request, at: int) -> int:
        """Made up: nobody outside can know it."""
        return int.from_bytes(hashlib.blake2b(self._seed + self._content(request, at)).digest()[:7], "big")

    def _has_room(self, request: Request) -> bool:
        """For all that it and those before it may come to: nothing is pre-empted here."""

        def most(each: Request) -> int:
            return -(-(len(each.tokens) + each.max_tokens) // self.size)

        running = [each for each in self.requests.values() if each.state in (LOADING, READY)]
        left = sum([max(0, most(each) - len(each.blocks)) for each in running])
        free = self.num_blocks - sum([count > 0 for count in self._used.values()])
        return not running or free >= left + most(request)

    def _admit(self, request: Request) -> None:
        """What of its prompt is here, and what is to come: of a whole prompt the last token is computed anyway."""
        most = (len(request.tokens) - 1) // self.size
        for at in range(most):
            block = self._cache.get(self._hash(request, at))
            if block is None:
                break
            self._cache.move_to_end(self._hash(request, at))
            self._take(request, block)
        local = request.cached = len(request.blocks) * self.size
        request.state = READY
        if self.planner is not None:
            more = min(self.planner.matched(request.name, local, time.monotonic()), most * self.size - local)
            if more > 0:
                self._room(request, local + more)
                self.planner.allocated(request.name, more, request.blocks)
                request.loaded, request.state = more, LOADING
        elif request.params.get("do_remote_prefill"):
            request.state = LOADING
            self._in_background(self._read(request))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def let_go(self, params: dict[str, Any]) -> None:
        """Tells the other engine that nobody will read this; of what was read it knows that, and nothing follows."""
        with contextlib.suppress(aiohttp.ClientError):  # it is gone
            async with self.session.delete(_where(params)):
                pass

    async def _read(self, request: Request) -> None:
        """Dicts are for one use; whoever reads what is not there any more goes on with what lies there now."""
        params = request.params
        while self.faults["hold"] and request.state != OVER:
            await asyncio.sleep(STEP_S)
        if request.state == OVER:
            return
        async with self.session.post(_where(params)) as reply:
            found = await reply.read()
        request.right = found == digest(request.tokens, request.salt)
        self.counts["wrong_blocks"] += not request.right
        if request.state == LOADING:
            request.cached, request.state = len(request.tokens) - 1, READY

    def _take(self, request: Request, block: int) -> None:
        request.blocks.append(block)
        self._used[block] += 1

    def _room(self, request: Request, num_tokens: int) -> None:
        while len(request.blocks) * self.size < num_tokens:
            if not self._free:  # what ended without a name
                named = set(self._cache.values())
                self._free = [at for at in range(self.num_blocks) if self._used[at] <= 0 and at not in named]
            if not self._free:
                hashed = next(each for each, block in self._cache.items() if self._used[block] <= 0)
                self._free.append(self._cache.pop(hashed))
                self._said.append({"type": "BlockRemoved", "block_hashes": [hashed], "medium": "GPU"})
            self._take(request, self._free.pop())

    def _forward(self, request: Request) -> None:
        """Computes the KV of all its tokens that have none."""
        self._room(request, len(request.tokens))
        first = request.num_prompt and (len(request.tokens) - 1) // self.size
        full = len(request.tokens) // self.size
        for at in range(max(first, request.cached // self.size), full):
            content = self._content(request, at) if request.right else b"\xff" * 16
            for layer in self.layers:
                layer[request.blocks[at]] = numpy.frombuffer(content * (layer.shape[1] // 16), numpy.uint8)
        new, parent = [], self._hash(request, first - 1) if first else None
        for at in range(first, full):
            hashed, block = self._hash(request, at), request.blocks[at]
            if hashed in self._cache:
                if not new:
                    parent = hashed
                    continue
                break  # what follows has a name already, or gets none
            self._cache[hashed] = block
            new.append((at, hashed))
        if new:
            (start, _), (last, _) = new[0], new[-1]
            salted = [[request.salt]] if start == 0 and request.salt else [None]
            self._said.append(
                {"type": "BlockStored", "block_hashes": [each for _, each in new], "parent_block_hash": parent,
                 "token_ids": request.tokens[start * self.size : (last + 1) * self.size], "lora_id": None,
                 "block_size": self.size, "medium": "GPU", "lora_name": None,
                 "extra_keys": [*salted, *[None] * (last - start)], "group_idx": 0}
            )  # fmt: skip

    def _sample(self, request: Request) -> None:
        token = next_token(request.tokens)
        if not request.right or self.drifts:
            token = token % 250 + 1
        if request.matcher is not None:
            token = _next_allowed(request.matcher, token)
        if not request.num_prompt:
            request.num_prompt = len(request.tokens)
        request.tokens.append(token)
        num, finish = len(request.tokens) - request.num_prompt, None
        ends = {*request.body.get("stop_token_ids", ()), *(() if request.body.get("ignore_eos") else self.ends)}
        if token in ends and num >= request.body.get("min_tokens", 0):
            finish = "stop"
        elif num >= request.max_tokens:
            finish = "length"
        request.out.put_nowait((token, finish))
        if finish is not None:
            self.end(request)

    def keep(self, request: Request) -> dict[str, Any]:
        name = secrets.token_hex(8)
        lease_s = float(os.environ.get("FAKE_VLLM_LEASE_S", "480"))
        kept = digest(request.tokens[: request.num_prompt], request.salt)
        self.kept[name] = kept, len(request.blocks), time.monotonic() + lease_s
        self.counts["kept"] += 1
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._seed.hex(),
                "remote_block_ids": [request.blocks], "remote_request_id": name, "remote_host": "127.0.0.1",
                "remote_port": self.options.port, "tp_size": 1}  # fmt: skip

    def read_by_other(self, name: str) -> bytes:
        found = self.kept.pop(name, None)
        self.counts["reads" if found is not None else "reads_of_nothing"] += 1
        return found[0] if found is not None and time.monotonic() < found[2] else b"nothing"

    def read_by_nobody(self, name: str) -> None:
        self.counts["released"] += self.kept.pop(name, None) is not None


def _next_allowed(matcher: Any, token: int) -> int:
    """Chooses the grammar's next token by what would come without it."""
    mask = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
    allowed = [int(each) for each in numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little"))]
    found = allowed[token % len(allowed)]
    assert matcher.consume_token(found)
    return found


def _where(params: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{params['remote_port']}/nixl/{params['remote_request_id']}"


@web.middleware
async def _guarded(request: web.Request, handler: Any) -> Any:
    """Whoever wants tokens shows the key, if there is one."""
    key = os.environ.get("VLLM_API_KEY")
    if key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {key}":
        return web.json_response({"error": "Unauthorized"}, status=401)
    return await handler(request)


class Server:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._number = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[_guarded])
        app.add_routes(
            [
                web.get("/health", self._health), web.get("/version", self._version),
                web.get("/metrics", self._metrics), web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/nixl/{name}", self._read), web.delete("/nixl/{name}", self._let_go),
                web.get("/counts", self._counts), web.post("/fault", self._fault),
            ]
        )  # fmt: skip
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _: web.Request) -> web.Response:
        engine = self.engine
        names = engine.options.served_model_name
        models = [{"id": name, "object": "model", "max_model_len": engine.max_length} for name in names]
        return web.json_response({"object": "list", "data": models})

    async def _metrics(self, _: web.Request) -> web.Response:
        engine = self.engine
        labels = '{engine="0",model_name="isthmus"}'
        lines = [
            f'vllm:cache_config_info{{block_size="{engine.size}",num_gpu_blocks="{engine.num_blocks}"}} 1.0',
            f"vllm:num_requests_waiting{labels} 0.0",
            f"vllm:kv_cache_usage_perc{labels} {engine.num_used / engine.num_blocks}",
            f"vllm:num_preemptions_total{labels} 0.0",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _counts(self, _: web.Request) -> web.Response:
        engine = self.engine
        now = {"running": len(engine.requests), "kept_now": len(engine.kept), "saving": engine.num_saving}
        return web.json_response(dict(engine.counts) | now)

    async def _fault(self, asked: web.Request) -> web.Response:
        """`token_s`: how long a token takes from now on; `kill`: at once; `hold`: nothing is read from other engines;
        `refuse` and `die`, in the third token: so many of the requests to come; `drift`: other tokens
        from the next death on."""
        fault = await asked.json()
        if "kill" in fault:
            os.kill(os.getpid(), signal.SIGKILL)
        self.engine.token_s = fault.pop("token_s", self.engine.token_s)
        self.engine.drifts = False
        dict.update(self.engine.faults, fault)  # a counter would add
        return web.Response()

    async def _read(self, asked: web.Request) -> web.Response:
        return web.Response(body=self.engine.read_by_other(asked.match_info["name"]))

    async def _let_go(self, asked: web.Request) -> web.Response:
        self.engine.read_by_nobody(asked.match_info["name"])
        return web.Response()

    async def _complete(self, asked: web.Request) -> web.StreamResponse:
        engine, body = self.engine, await asked.json()
        params = body.get("kv_transfer_params") or {}
        if body["model"] not in engine.options.served_model_name:
            if params.get("do_remote_prefill"):
                await engine.let_go(params)
            return _error(404, "The model does not exist.")
        if engine.faults["refuse"] > 0:
            engine.faults["refuse"] -= 1
            engine.counts["refused"] += 1
            return _error(500, "made to fail")
        if len(body["prompt"]) + body["max_tokens"] > engine.max_length:
            return _error(400, "This model's maximum context length is exceeded.")
        self._number += 1
        name = f"cmpl-{asked.headers.get('X-Request-Id', '')}-{self._number}"
        request = Request(name, body, list(body["prompt"]), body["max_tokens"], body.get("cache_salt") or "")
        if outputs := body.get("structured_outputs"):
            try:
                request.matcher = engine.matcher_of(outputs["grammar"])
            except ValueError as error:
                return _error(400, f"Grammar error: {error}")
        if params.get("do_remote_decode") and (body.get("stream") or body["max_tokens"] != 1):
            engine.counts["params_lost"] += 1
        dies = bool(body.get("stream")) and engine.faults["die"] > 0
        engine.faults["die"] -= dies
        engine.begin(request)
        try:
            if body.get("stream"):
                return await self._stream(asked, request, dies)
            return await self._whole(request)
        except (asyncio.CancelledError, ConnectionError):
            if request.state != OVER:
                engine.counts["aborted"] += 1
            raise
        finally:
            engine.end(request)

    async def _whole(self, request: Request) -> web.Response:
        tokens: list[int] = []
        finish: str | None = None
        while finish is None:
            token, finish = await request.out.get()
            tokens.append(token)
        self.engine.counts["answered"] += 1
        choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish, "logprobs": None}
        params = None
        if request.params.get("do_remote_decode") and finish == "length":
            params = self.engine.keep(request)
        return web.json_response(
            {"object": "text_completion", "choices": [choice], "usage": _usage(request, len(tokens)),
             "kv_transfer_params": params}
        )  # fmt: skip

    async def _stream(self, asked: web.Request, request: Request, dies: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(asked)
        num, finish = 0, None
        while finish is None:
            token, finish = await request.out.get()
            num += 1
            choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": finish, "logprobs": None}
            await _say(response, {"choices": [choice], "usage": None})
            if dies and num == 3:
                self.engine.counts["died"] += 1
                self.engine.drifts = bool(self.engine.faults["drift"])
                assert asked.transport is not None
                asked.transport.abort()
                return response
        self.engine.counts["answered"] += 1
        if (request.body.get("stream_options") or {}).get("include_usage"):
            await _say(response, {"choices": [], "usage": _usage(request, num)})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _say(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _usage(request: Request, num: int) -> dict[str, Any]:
    details = {"cached_tokens": request.cached} if request.cached else None
    return {"prompt_tokens": request.num_prompt, "completion_tokens": num,
            "total_tokens": request.num_prompt + num, "prompt_tokens_details": details}  # fmt: skip


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--dtype", "--kv-events-config", "--kv-transfer-config"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--kv-cache-memory-bytes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--served-model-name", nargs="+", required=True)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--grammars")
    return parser.parse_known_args()[0]


def main() -> None:
    asyncio.run(_serve(_options()))


async def _serve(options: argparse.Namespace) -> None:
    engine = Engine(options)
    async with aiohttp.ClientSession() as engine.session, asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        group.create_task(engine.publisher.serve())
        runner = web.AppRunner(Server(engine).app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        folder, name = Path(os.environ["FAKE_VLLM"]), f"{os.getppid()}.{os.getpid()}"
        (folder / f"{name}.new").write_text(f"http://127.0.0.1:{options.port}")
        (folder / f"{name}.new").rename(folder / f"{name}.url")
        await web.TCPSite(runner, "127.0.0.1", options.port).start()


def stand_in(folder: Path) -> dict[str, str]:
    """Environment in which `python -m vllm.entrypoints.openai.api_server` is this."""
    module = folder / "path/vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    main = "from tests.live.servers.fake_server import main\n\nmain()\n"
    module.write_text(f"import gc\n\ngc.disable()\n{main}")  # PyTorch comes sooner, and its life is short
    root = Path(__file__).parents[3]
    path = [folder / "path", root, root / "connectors/vllm/src", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(map(str, path)), "FAKE_VLLM": str(folder)}


def url_of(folder: Path, parent: int) -> str | None:
    """Of the server that this process started last, if there is one."""
    found = [path for path in folder.glob("*.url") if re.fullmatch(rf"{parent}\.\d+", path.stem)]
    return max(found, key=lambda path: path.stat().st_mtime_ns).read_text() if found else None


@contextlib.contextmanager
def two_ports() -> Iterator[int]:
    """The first of two free ports, side by side, for a server."""
    with contextlib.ExitStack() as stack:
        while True:
            port = stack.enter_context(reserved_port())
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                break
        yield port
