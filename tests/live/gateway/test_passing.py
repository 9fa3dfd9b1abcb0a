"""The front of servers that run already: what is read of a body, which paths pass, and who may ask."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import OverloadedError, RequestError
from isthmus.core.types import PassedRequest
from isthmus.live.gateway.passing import create_passing_app, read_fields
from isthmus.live.gateway.settings import ApiKey, GatewaySettings, TenantLimits

from .server import fronted, get, post

PARTS = [b"data: one\n\n", b"data: two\n\n", b"\x00\xff raw"]


class Answer:
    status, headers = (
        203,
        [
            (b"content-type", b"text/event-stream"),
            (b"x-vendor", b"kept"),
            (b"x-odd", b"a\x07"),
            (b"Access-Control-Allow-Origin", b"*"),
            (b"Access-Control-Allow-Credentials", b"true"),
            (b"vary", b"Origin"),
        ],
    )

    num_tokens = (30, 12)

    async def chunks(self) -> AsyncGenerator[bytes]:
        for part in PARTS:
            yield part

    def close(self) -> None:
        pass


class Backend:
    """Answers everything; keeps what was asked."""

    healthy = True

    def __init__(self) -> None:
        self.passed: list[PassedRequest] = []
        self.changes: list[tuple[Sequence[str], Sequence[str]]] = []

    def models(self) -> list[dict[str, Any]]:
        return [{"id": "m"}, {"id": "org/m", "own": 1}]

    async def forward(self, passed: PassedRequest) -> Answer:
        self.passed.append(passed)
        if passed.model == "full":
            raise OverloadedError("full", retry_after_s=3)
        return Answer()

    async def change_servers(self, add: Sequence[str], remove: Sequence[str]) -> list[str]:
        self.changes.append((add, remove))
        if add == ["ftp://x"]:
            raise RequestError("'ftp://x' is no server")
        return ["a line"]

    def status(self) -> list[Any]:
        return [{"server": "s"}]

    def gauges(self) -> dict[str, dict[str, float]]:
        return {"server_up": {"s": 1.0}, "server_requests_total": {"s": 2.0}}


BODY = json.dumps(
    {
        "model": "m",
        "stream": True,
        "max_tokens": 7,
        "vendor": [1],
        "messages": [{"role": "user", "content": "é"}],
    }
)


def test_a_request_passes_with_what_placement_needs() -> None:
    backend = Backend()
    with fronted(create_passing_app(backend, GatewaySettings())) as front:
        answer = front.ask(
            post("/v1/chat/completions?x=%2F", BODY.encode(), "X-Own: 1", "Authorization: Bearer of-client")
        )
        assert answer.status == 203 and answer.body == b"".join(PARTS)
        assert answer.headers["x-vendor"] == "kept"
    (passed,) = backend.passed
    assert "x-odd" not in answer.headers
    assert (passed.method, passed.target, passed.body) == ("POST", "/v1/chat/completions?x=%2F", BODY.encode())
    assert (passed.model, passed.max_tokens, passed.is_streamed) == ("m", 7, True)
    headers = dict(passed.headers)
    assert headers["x-own"] == "1" and headers["authorization"] == "Bearer of-client"
    assert not headers.keys() & {"host", "content-length", "connection"}


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (get("/v1/responses/r1"), 203),
        (post("/v1/embeddings", b"{}"), 203),
        (post("/v1/audio/transcriptions", b"--form\r\nnot JSON"), 203),
        (post("/rerank", b'{"model": 5}'), 203),
        (post("/v1/load_lora_adapter", b"{}"), 403),
        (post("/v1/load_lora_adapter/", b"{}"), 403),
        (post("/reset_prefix_cache", b""), 404),
        (post("/api/pull", b"{}"), 404),
        (get("/v1/..%2fsleep"), 404),
        (get("/v1/%2e%2e/sleep"), 404),
        (get("/v1/a%20HTTP/1.1%0dX-Evil:1"), 404),
        (get("/v1/models/org%2Fm"), 200),
        (get("/v1/models/org/m"), 200),
        (get("/v1/models/nobody"), 404),
        (post("/v1/models/m", b"{}"), 203),
        (post("/completion", b'{"prompt": "of llama.cpp"}'), 203),
        (post("/inference/v1/generate", b'{"token_ids": [1]}'), 203),
        (post("/props", b"{}"), 404),
        (get("/version"), 203),
        (post("/v1/completions", b'{"model": "m", "stream": null, "max_tokens": 1e2}'), 203),
        (post("/v1/chat/completions", b'{"model": "full"}'), 429),
        (post("/v1/chat/completions", b'{"a":' + b"[" * 100_000 + b"}"), 400),
        (get("/v1/models"), 200),
        (get("/status"), 200),
        (get("/health"), 200),
    ],
)
def test_which_paths_pass(asked: bytes, status: int) -> None:
    with fronted(create_passing_app(Backend(), GatewaySettings())) as front:
        assert front.ask(asked).status == status


def test_one_model_of_the_list() -> None:
    """vLLM has no such page, and clients ask for it."""
    with fronted(create_passing_app(Backend(), GatewaySettings())) as front:
        assert json.loads(front.ask(get("/v1/models/org/m")).body) == {"id": "org/m", "own": 1}
        error = json.loads(front.ask(get("/v1/models/nobody")).body)["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_which_pages_may_read_an_answer_is_said_once() -> None:
    """Many servers allow all origins; browsers refuse an answer that says it twice, and the front knows better."""
    own = "http://localhost:3000"
    with fronted(create_passing_app(Backend(), GatewaySettings())) as front:
        headers = front.ask(post("/v1/completions", b"{}", f"Origin: {own}")).headers
        assert headers["access-control-allow-origin"] == own and headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in headers
        bare = front.ask(post("/v1/completions", b"{}")).headers
        assert "access-control-allow-origin" not in bare and bare["vary"] == "Origin"


@pytest.mark.parametrize(
    ("path", "body", "prefix", "limit", "streams"),
    [
        ("/api/chat", {"messages": [1], "options": {"num_predict": 5}}, b"[1", 5, True),  # Ollama
        ("/api/generate", {"system": "s", "prompt": "p", "stream": False}, b'"s""p', 0, False),
        ("/generate", {"text": "t", "sampling_params": {"max_new_tokens": 3}}, b'"t', 3, False),  # SGLang
        ("/generate", {"input_ids": [1, 2], "stream": True}, b"[1,2", 0, True),
        ("/completion", {"prompt": "p", "n_predict": 4}, b'"p', 4, False),  # llama.cpp
        ("/v1/messages", {"system": "s", "messages": [1], "max_tokens": 9}, b'"s"[1', 9, False),  # Anthropic's
        ("/v1/responses", {"input": "i", "text": {"format": {}}, "max_output_tokens": 2}, b'"i', 2, False),
        ("/v1/embeddings", {"input": "i", "options": [], "sampling_params": 1}, b'"i', 0, False),
    ],
)
def test_what_is_read_of_bodies_of_other_servers(
    path: str, body: dict[str, Any], prefix: bytes, limit: int, streams: bool
) -> None:
    backend = Backend()
    with fronted(create_passing_app(backend, GatewaySettings())) as front:
        front.ask(post(path, json.dumps(body, separators=(",", ":")).encode()))
    (passed,) = backend.passed
    assert (passed.prefix, passed.max_tokens, passed.is_streamed) == (prefix, limit, streams)


def test_keys_are_asked_for_and_not_passed_on() -> None:
    backend, key = Backend(), ApiKey("acme", hashlib.sha256(b"secret").digest())
    with fronted(create_passing_app(backend, GatewaySettings(keys=(key,)))) as front:
        assert front.ask(post("/v1/completions", b"{}")).status == 401
        assert front.ask(get("/metrics")).status == 401
        assert front.ask(post("/v1/completions", b"{}", "Authorization: Bearer secret")).status == 203
    (passed,) = backend.passed
    assert passed.tenant == "acme" and passed.salt and "authorization" not in dict(passed.headers)


def test_a_tenant_that_has_spent_its_tokens_waits() -> None:
    keys = [ApiKey(name, hashlib.sha256(name.encode()).digest()) for name in ("acme", "other")]
    limits = {"acme": TenantLimits(tokens_per_s=0.001, burst_s=40_000), "other": TenantLimits()}
    settings = GatewaySettings(keys=tuple(keys), tenant_limits=limits, names_tenants=True)
    with fronted(create_passing_app(Backend(), settings)) as front:
        acme, other = [post("/v1/completions", b"{}", f"Authorization: Bearer {name}") for name in limits]

        def has_spent(name: str) -> str:
            """The metrics, as soon as the tenant's answer has been charged, which may be after its end has come."""
            until, line = time.monotonic() + 60, f'tokens_total{{kind="generation",tenant="{name}"}} 12.0'
            while line not in (told := front.ask(get("/metrics", "Authorization: Bearer other")).body.decode()):
                assert time.monotonic() < until, told
            return told

        assert front.ask(acme).status == 203
        has_spent("acme")
        assert front.ask(acme).status == 429, "there were 40 tokens, and 42 are spent"
        assert front.ask(other).status == 203
        metrics = has_spent("other")
    assert 'isthmus_tenant_tokens_total{kind="prompt",tenant="acme"} 30.0' in metrics
    assert 'isthmus_tenant_requests_refused_total{limit="tokens_per_s",tenant="acme"} 1.0' in metrics


def test_metrics_name_servers() -> None:
    with fronted(create_passing_app(Backend(), GatewaySettings())) as front:
        text = front.ask(get("/metrics")).body.decode()
    assert 'isthmus_server_up{server="s"} 1.0' in text
    assert 'isthmus_server_requests_total{server="s"} 2.0' in text


TEXT = st.text(max_size=30)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.tuples(TEXT, TEXT))
def test_a_longer_conversation_begins_alike(turns: list[tuple[str, str]], more: tuple[str, str]) -> None:
    def prefix(turns: list[tuple[str, str]]) -> bytes:
        messages = [{"role": role, "content": text} for role, text in turns]
        return read_fields(json.dumps({"tools": [1], "messages": messages, "model": "m"}).encode()).prefix

    assert prefix([*turns, more]).startswith(prefix(turns)) and prefix(turns).startswith(b"[1]")


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | TEXT, st.lists).map(lambda v: json.dumps(v).encode())
)
def test_any_body_is_read(body: bytes) -> None:
    assert isinstance(read_fields(body).prefix, bytes)
