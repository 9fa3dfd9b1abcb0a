"""The load generator against a small real server that speaks the streaming protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from isthmus.bench import BenchError
from isthmus.bench.serve import METRICS, Result, Row, _token_times_s, outcome, run, total

SMALL = Row(prompt_tokens=5, output_tokens=4, concurrency=2, requests=3)


@dataclass
class FakeServer:
    """Answers with `num_tokens` tokens, or as many as were asked for, and logs what it was sent."""

    name: str
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_tokens: int | None = None
    status: int = 200
    usage: bool = True
    one_event: bool = False
    failure: str | None = None
    keys: set[str | None] = field(default_factory=set)
    num_active: int = 0
    num_active_max: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        return app

    async def models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        return web.json_response({"object": "list", "data": [{"id": f"model-{self.name}"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys.add(request.headers.get("Authorization"))
        self.log.append((self.name, body))
        if self.status != 200:
            return web.Response(status=self.status, text="out of order")
        self.num_active += 1
        self.num_active_max = max(self.num_active_max, self.num_active)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self.pieces(body):
            await response.write(piece)
            await asyncio.sleep(0.002)
        self.num_active -= 1
        return response

    def pieces(self, body: dict[str, Any]) -> list[bytes]:
        """The answer as it goes over the wire, cut in the middle of events."""
        num_tokens = body["max_tokens"] if self.num_tokens is None else self.num_tokens
        texts = ["", *(chr(97 + index) for index in range(num_tokens - 1))]  # the first has no text yet
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None} for text in texts
        ]
        events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.one_event:
            events = [{"choices": [{"index": 0, "text": "".join(texts), "finish_reason": "length"}]}]
        if self.failure:
            events.append({"error": {"message": self.failure}})
        if self.usage:
            counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
            events.append({"choices": [], "usage": counts})
        lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
        stream = b"".join(lines)
        cuts = [0, *itertools.accumulate(len(line) for line in lines[:-1]), len(stream)]
        return [stream[max(0, a - 7) : b - 7 if b < len(stream) else b] for a, b in itertools.pairwise(cuts)]


@contextlib.asynccontextmanager
async def listening(server: FakeServer) -> AsyncIterator[str]:
    runner = web.AppRunner(server.app())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def bench(
    *servers: FakeServer,
    rows: list[Row],
    rounds: int = 1,
    seed: int = 0,
    model: str | None = None,
    keys: tuple[str | None, str | None] = (None, None),
) -> list[Result]:
    """Run the load generator in a thread of its own against the servers, which live in this one."""

    async def drive() -> list[Result]:
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(server)) for server in servers]
            return await asyncio.to_thread(
                run, urls, model=model, rows=rows, rounds=rounds, seed=seed, keys=keys
            )

    return asyncio.run(drive())


def test_one_server_gets_every_request_as_specified() -> None:
    server = FakeServer("a")
    [result] = bench(server, rows=[SMALL], rounds=2)
    assert len(server.log) == SMALL.requests * 3  # one warm-up round and two counted ones
    assert result["num_requests"] == SMALL.requests * 2
    assert result["errors"] == []
    assert result["model"] == "model-a"
    assert len(result["output_tokens_per_s_by_round"]) == 2
    assert server.num_active_max <= SMALL.concurrency
    for _, body in server.log:
        prompt = body.pop("prompt")
        assert len(prompt) == 5
        assert all(0 <= token < 256 for token in prompt)
        assert body == {
            "model": "model-a",
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def test_rates_follow_from_the_row_and_ratios_are_first_over_second() -> None:
    result, _ = bench(FakeServer("a"), FakeServer("b"), rows=[SMALL])
    assert result["total_tokens_per_s"] == pytest.approx(result["output_tokens_per_s"] * 9 / 4)
    assert result["output_tokens_per_s_by_round"] == [pytest.approx(result["output_tokens_per_s"])]
    assert result["ttft_ms_p50"] <= result["ttft_ms_p90"] <= result["ttft_ms_p99"]
    assert result["prefill_tokens_per_s"] is None
    assert set(METRICS) - set(result["ratios"]) == {"prefill_tokens_per_s"}
    first, second = bench(FakeServer("a"), FakeServer("b"), rows=[Row(5, 4, concurrency=1, requests=2)])
    assert first["prefill_tokens_per_s"] == pytest.approx(5 * 1000 / first["ttft_ms_mean"])
    assert first["ratios"] == {name: pytest.approx(first[name] / second[name]) for name in METRICS}


def test_servers_take_turns_with_the_same_prompts_which_never_repeat_and_follow_the_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        log: list[tuple[str, dict[str, Any]]] = []
        bench(FakeServer("a", log), FakeServer("b", log), rows=[SMALL, SMALL], rounds=2, seed=seed)
        turns = [(name, len(list(group))) for name, group in itertools.groupby(log, key=lambda entry: entry[0])]
        assert turns == [("a", 3), ("b", 3)] * 6
        prompts = {name: sorted(tuple(body["prompt"]) for who, body in log if who == name) for name in "ab"}
        assert prompts["a"] == prompts["b"]
        found.append(prompts["a"])
    assert found[0] == found[1] and len({*found[0], *found[2]}) == 2 * len(found[0])


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (FakeServer("a", num_tokens=3), "usage says 5 prompt and 3 output tokens, asked for 5 prompt and 4"),
        (FakeServer("a", usage=False), "ended without usage, after 5 events"),
        (FakeServer("a", failure="no memory"), "no memory"),
        (FakeServer("a", status=503), "503: out of order"),
        (FakeServer("a", one_event=True), "as one event"),
    ],
    ids=["count", "usage", "error event", "status", "one event"],
)
def test_a_server_that_never_answers_well_is_an_error(server: FakeServer, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        bench(server, rows=[SMALL])


def test_a_bad_answer_is_reported_and_left_out() -> None:
    class OnceShort(FakeServer):
        def pieces(self, body: dict[str, Any]) -> list[bytes]:
            self.num_tokens = 2 if len(self.log) == SMALL.requests + 1 else None  # the first counted request
            return super().pieces(body)

    [result] = bench(OnceShort("a"), rows=[SMALL])
    assert result["num_requests"] == SMALL.requests - 1
    [error] = result["errors"]
    assert error.startswith("round 1, request ")
    assert "2 output tokens" in error


@pytest.mark.parametrize(
    ("texts", "times"),
    [
        (["", "é", "a"], [0, 1, 2]),  # the first token is half a character
        (["a", "b", ""], [0, 1, 2]),  # the last one is, and closes the stream
        (["", "b", "c", ""], [0, 1, 2]),  # a closing event of its own
        (["", "a", "b", "c", ""], [1, 2, 3]),  # an opening event too
        (["a", "bc"], [0, 1]),  # two tokens in one event
    ],
)
def test_events_without_tokens_are_told_apart(texts: list[str], times: list[float]) -> None:
    assert _token_times_s(list(enumerate(texts)), num_tokens=3) == times


def test_an_unreachable_server_and_impossible_requests_are_errors() -> None:
    for model in (None, "m"):
        with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:9 does not answer"):
            run(["http://127.0.0.1:9"], model=model, rows=[SMALL], rounds=1, seed=0)
    with pytest.raises(BenchError, match="one or two servers"):
        run([], model=None, rows=[SMALL], rounds=1, seed=0)
    with pytest.raises(BenchError, match="one counted round"):
        run(["http://127.0.0.1:9"], model=None, rows=[SMALL], rounds=0, seed=0)
    with pytest.raises(BenchError, match="at least"):
        Row(prompt_tokens=1, output_tokens=1, concurrency=1, requests=1)


def test_json_keys_are_frozen_and_have_no_api_key_and_answers_are_compared() -> None:
    class Other(FakeServer):
        def pieces(self, body: dict[str, Any]) -> list[bytes]:
            return [piece.replace(b'"b"', b'"x"') for piece in super().pieces(body)]

    servers = FakeServer("a"), Other("b")
    results = bench(*servers, rows=[SMALL, SMALL], keys=("sk-a", None))
    assert [server.keys for server in servers] == [{"Bearer sk-a"}, {None}]
    plain = json.loads(json.dumps(outcome(results).json))
    assert len(plain) == 4 and "sk-a" not in json.dumps(plain)
    assert sorted(plain[0]) == sorted([
        "prompt_tokens", "output_tokens", "concurrency", "requests", "url", "model", "num_requests", "errors",
        "ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99",
        "tbt_ms_mean", "tbt_ms_p50", "tbt_ms_p90", "tbt_ms_p99", "time_per_output_token_ms_mean",
        "output_tokens_per_s", "output_tokens_per_s_by_round", "total_tokens_per_s", "prefill_tokens_per_s",
        "engine_step_ms_mean", "overhead_ms_per_token", "ratios", "other_texts",
    ])  # fmt: skip
    assert (plain[0]["other_texts"], plain[1]["other_texts"], plain[1]["ratios"]) == (SMALL.requests, None, {})
    [shown] = outcome(results).tables
    assert [row[0] for row in shown.rows] == ["5/4 x 2", "5/4 x 2", ""] * 2
    assert [row[1] for row in shown.rows[2::3]] == ["ratio", "ratio"]
    same, _ = bench(FakeServer("a"), FakeServer("b"), rows=[SMALL])
    assert same["other_texts"] == 0


METRICS_TEXT = """# HELP a b
a{node="prefill-0"} 2.0
a{kind="x",node="decode-1"} 3
a_more{node="decode-1"} 9
b 1
"""


def test_a_metric_is_read_over_its_labels() -> None:
    assert (total(METRICS_TEXT, "a"), total(METRICS_TEXT, "b")) == (5, 1)
    assert (total(METRICS_TEXT, "a", "decode", "mixed"), total(METRICS_TEXT, "a", "prefill")) == (3, 2)
