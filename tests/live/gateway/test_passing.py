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
        [(b"content-type", b"text/event-stream"), (b"x-vendor", b"kept"), (b"x-odd", b"a\x07")],
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
        return [{"id": "m"}]

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
        (get("/v1/models/org%2Fm"), 203),
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
