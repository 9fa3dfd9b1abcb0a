"""Which web pages may ask, as their browsers ask for them."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.settings import ApiKey, GatewaySettings

from .fake import FakeBackend
from .inprocess import Poster

CHAT = "/v1/chat/completions"
HERE, THERE = "http://localhost:3000", "https://site.example"
KEYS = (ApiKey("acme", hashlib.sha256(b"secret").digest()),)


@pytest.fixture
def keyed(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Poster:
    return Poster(create_app(backend, tokenizer, GatewaySettings(keys=KEYS)))


def naming(backend: FakeBackend, tokenizer: GatewayTokenizer, *origins: str) -> Poster:
    return Poster(create_app(backend, tokenizer, GatewaySettings(origins=origins)))


def preflight(post: Poster, origin: str, path: str = CHAT, **headers: str) -> httpx.Response:
    """As Chrome asks before it sends what OpenAI's JavaScript client gives it."""
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    return post.request("OPTIONS", path, headers=asked | headers)


def chat(post: Poster, origin: str, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"Origin": origin} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return post.request("POST", CHAT, json=body, headers=headers)


def is_shown(answer: httpx.Response, origin: str) -> bool:
    """Whether a browser lets a page of this origin read it."""
    assert "Origin" in answer.headers["vary"].split(", ")
    assert "access-control-allow-credentials" not in answer.headers
    return answer.headers.get("access-control-allow-origin") in ("*", origin)


@pytest.mark.parametrize(
    "origin",
    [HERE, "https://127.0.0.1", "http://[::1]:8080", "http://tauri.localhost", "app://obsidian.md", "vscode-webview://1ab"],
)  # fmt: skip
def test_a_page_of_this_machine_may_ask(post: Poster, backend: FakeBackend, origin: str) -> None:
    allowed = preflight(post, origin, **{"Access-Control-Request-Private-Network": "true"})
    assert allowed.status_code == 200 and is_shown(allowed, origin)
    assert "POST" in allowed.headers["access-control-allow-methods"].split(", ")
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert not backend.jobs
    for fields in ({}, {"stream": True}):
        answer = chat(post, origin, **fields)
        assert answer.status_code == 200 and is_shown(answer, origin)
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "retry-after"} <= {*exposed}


@pytest.mark.parametrize(
    "origin",
    [THERE, "null", "http://localhost.site.example", "https://site.example:8000", "http://127.0.0.1.nip.io", "http://localhost:1@site.example"],
)  # fmt: skip
def test_a_page_from_elsewhere_cannot_make_a_server_without_keys_compute(
    post: Poster, backend: FakeBackend, origin: str
) -> None:
    """`text/plain` is what a page can send without a preflight."""
    told = {
        "message": f"pages of {origin!r} may not ask this server; whoever runs it can allow them (cors.origins)",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    simple = {"Origin": origin, "Content-Type": "text/plain"}
    for refused in (
        preflight(post, origin),
        post.request("POST", "/v1/completions", content=b'{"prompt": "hi"}', headers=simple),
        post.request("GET", "/status", headers=simple),
    ):
        assert (refused.status_code, refused.json()["error"]) == (403, told)
        assert not is_shown(refused, origin) and refused.headers["x-request-id"]
    assert not backend.jobs
    assert 'isthmus_requests_failed_total{status="403"} 3.0' in post.get("/metrics").text


def test_where_keys_are_asked_for_any_page_may_show_one(keyed: Poster, backend: FakeBackend) -> None:
    allowed = preflight(keyed, THERE)
    assert allowed.status_code == 200 and is_shown(allowed, THERE) and not backend.jobs
    for key, status in (("", 401), ("wrong", 401), ("secret", 200)):
        answer = chat(keyed, THERE, key)
        assert answer.status_code == status and is_shown(answer, THERE)


def test_the_configured_pages_may_ask_and_no_others(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    for origins, shown in (
        ((THERE,), [THERE]),
        (("*",), [THERE, HERE, "null"]),
        (("null",), ["null"]),
        ((), []),
    ):
        post = naming(backend, tokenizer, *origins)
        for origin in (THERE, HERE, "null"):
            answers = [preflight(post, origin), chat(post, origin)]
            assert [answer.status_code for answer in answers] == ([200, 200] if origin in shown else [403, 403])
            assert [is_shown(answer, origin) for answer in answers] == [origin in shown] * 2


def test_a_page_can_read_why_it_was_refused(post: Poster, backend: FakeBackend) -> None:
    """Also of a bug, whose answer is made outside of everything else."""
    answers = [
        chat(post, HERE, max_tokens="x"),
        post.request("GET", "/no/such/route", headers={"Origin": HERE}),
        post.request("GET", CHAT, headers={"Origin": HERE}),
    ]
    backend.healthy = False
    answers.append(post.request("GET", "/health", headers={"Origin": HERE}))
    backend.submit = None  # type: ignore[assignment, method-assign]
    answers.append(chat(post, HERE))
    assert [answer.status_code for answer in answers] == [400, 404, 405, 503, 500]
    assert all(is_shown(answer, HERE) and answer.headers["x-request-id"] for answer in answers)


def test_programs_that_are_no_browsers_are_served_as_ever(post: Poster) -> None:
    answer = post.chat()
    assert answer.status_code == 200 and answer.headers["vary"] == "Origin"
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert post.request("OPTIONS", CHAT).status_code == 405
