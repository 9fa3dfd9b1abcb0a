"""API keys: who is let in, what others are told, and that tenants have caches of their own."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from starlette.types import Message, Scope

from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app
from isthmus.live.gateway import headers as module
from isthmus.live.gateway.headers import ApiKeys, UnauthorizedError, salt_of, tenant_of
from isthmus.live.gateway.settings import ApiKey

from .fake import FakeBackend
from .inprocess import Poster
from .server import serving

ACME, NEW, GLOBEX = "sk-acme-old", "sk-acme-new", "sk-globex-!~"


def known(key: str, tenant: str) -> ApiKey:
    return ApiKey(tenant, hashlib.sha256(key.encode()).digest())


KEYS = (known(ACME, "acme"), known(GLOBEX, "globex"), known(NEW, "acme"))
GUARDED = [
    ("GET", "/metrics"),
    ("GET", "/status"),
    ("GET", "/version"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/acme/tiny"),
    ("GET", "/openapi.json"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("OPTIONS", "/v1/chat/completions"),
    ("POST", "/health"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/no/such/route"),
]


@pytest.fixture
def keyed(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Poster:
    return Poster(create_app(backend, tokenizer, GatewaySettings(keys=KEYS)))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def complete(post: Poster, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "hi", **fields}
    return post.request("POST", "/v1/completions", json=body, headers=bearer(key))


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_without_a_key_nothing_is_answered(keyed: Poster, backend: FakeBackend, method: str, path: str) -> None:
    refused = keyed.request(method, path, headers={"X-Request-Id": "mine"})
    assert refused.status_code == 401
    assert (refused.headers["www-authenticate"], refused.headers["x-request-id"]) == ("Bearer", "mine")
    assert refused.json()["error"] == {
        "message": "this server needs an API key: send the header 'Authorization: Bearer KEY'",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    assert not backend.jobs


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong")])
def test_whether_it_lives_everybody_may_know(keyed: Poster, path: str, headers: dict[str, str]) -> None:
    assert keyed.request("GET", path, headers=headers).status_code == 200
    assert keyed.request("HEAD", path, headers=headers).status_code == 200


def test_a_wrong_key_is_refused_and_not_repeated(keyed: Poster, backend: FakeBackend) -> None:
    refused = complete(keyed, "sk-wrong-one")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert refused.headers["www-authenticate"] == "Bearer" and refused.headers["x-request-id"]
    assert "sk-wrong-one" not in refused.text and not backend.jobs


def test_refusals_are_counted_as_other_failures(keyed: Poster) -> None:
    complete(keyed, "wrong")
    keyed.get("/status")
    counted = keyed.request("GET", "/metrics", headers=bearer(ACME)).text
    assert 'isthmus_requests_failed_total{status="401"} 2.0' in counted


@pytest.mark.parametrize("key", [ACME, NEW, GLOBEX])
@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} "])
def test_every_key_opens(keyed: Poster, key: str, form: str) -> None:
    headers = {"Authorization": form.format(key)}
    assert keyed.request("GET", "/v1/models", headers=headers).status_code == 200
    document = keyed.request("GET", "/openapi.json", headers=headers).json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert "security" not in document["paths"]["/health"]["get"]
    assert document["paths"]["/status"]["get"]["security"] == [{"key": []}]


def test_without_keys_none_is_asked_for(post: Poster, backend: FakeBackend) -> None:
    assert complete(post, "whatever", user="me", cache_salt="4:acme:").status_code == 200
    (job,) = backend.jobs
    assert (job.tenant, job.salt) == ("me", "4:acme:")


def test_a_job_is_the_key_s_tenant_s_whatever_the_body_says(keyed: Poster, backend: FakeBackend) -> None:
    for key in (ACME, NEW, GLOBEX):
        assert complete(keyed, key, user="root", cache_salt="s").status_code == 200
    old, new, other = backend.jobs
    assert (old.tenant, new.tenant, other.tenant) == ("acme", "acme", "globex")
    assert old.salt == new.salt != other.salt
    chat = {"messages": [{"role": "user", "content": "hi"}], "cache_salt": "s"}
    assert keyed.request("POST", "/v1/chat/completions", json=chat, headers=bearer(ACME)).status_code == 200
    assert (backend.jobs[-1].tenant, backend.jobs[-1].salt) == ("acme", old.salt)


Sent = tuple[int, dict[bytes, bytes], bytes]


def ask(
    app: Any, *headers: tuple[bytes, bytes], body: bytes | None = None, path: str = "/v1/completions"
) -> Sent:
    """Status, headers and body of an answer. `body` None: to read it is a failure."""
    sent: list[Message] = []

    async def receive() -> Message:
        assert body is not None, "the body is read"
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": list(headers),
        "server": ("test", 80),
        "client": ("test", 1),
    }
    asyncio.run(app(scope, receive, send))
    start, *rest = sent
    return start["status"], dict(start["headers"]), b"".join(message["body"] for message in rest)


def test_a_body_is_not_read_before_the_key(keyed: Poster) -> None:
    assert ask(keyed.app)[0] == 401
    assert ask(keyed.app, (b"authorization", b"Bearer no"), (b"content-length", b"999999999"))[0] == 401
    with pytest.raises(AssertionError, match="the body is read"):
        ask(keyed.app, (b"authorization", b"Bearer " + ACME.encode()))


def test_two_headers_are_no_key_even_if_one_is_right(keyed: Poster) -> None:
    right = (b"authorization", b"Bearer " + ACME.encode())
    for headers in (
        (right, right),
        (right, (b"authorization", b"Bearer no")),
        ((b"authorization", b""), right),
    ):
        status, _, body = ask(keyed.app, *headers)
        assert (status, json.loads(body)["error"]["message"]) == (
            401,
            "the header 'Authorization' is given 2 times",
        )


@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from([b"authorization", b"x-api-key", b"api-key", b"x-request-id"]),
            st.binary(max_size=40)
            | st.builds(lambda gap, key: b"Bearer" + gap + key, st.binary(max_size=3), st.binary(max_size=20))
            | st.sampled_from([b"Bearer " + key.encode() for key in (ACME, NEW, GLOBEX)]),
        ),
        max_size=4,
    )
)
def test_only_one_header_with_a_key_opens(headers: list[tuple[bytes, bytes]]) -> None:
    reached = []

    async def inner(scope: Scope, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def refusal(scope: Scope, receive: Any, send: Any) -> None:
        """Says nothing."""

    app = ApiKeys(inner, keys=KEYS, open=(), refuse=lambda error: refusal)
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(app(scope, None, None))  # type: ignore[arg-type]
    shown = [value for name, value in headers if name == b"authorization"]
    tenants = {ACME: "acme", NEW: "acme", GLOBEX: "globex"}
    right = {f"Bearer {key}".encode(): tenant for key, tenant in tenants.items()}
    if len(shown) == 1 and shown[0] in right:
        assert tenant_of(reached[0]) == right[shown[0]]
    elif reached:  # what was drawn is a key in another form: bearer, more spaces
        (value,) = shown
        scheme, key = value.strip().split(None, 1)
        assert scheme.lower() == b"bearer" and tenant_of(reached[0]) == tenants[key.decode()]


@pytest.mark.parametrize("shown", [ACME, GLOBEX, NEW, "wrong", ""])
def test_the_work_is_the_same_for_every_key(shown: str) -> None:
    """Times are too noisy to compare: each digest is, once, to its end, whichever key it is."""
    with mock.patch.object(hmac, "compare_digest", wraps=hmac.compare_digest) as compared:
        try:
            module._tenant_by(KEYS, shown.encode())
        except UnauthorizedError:
            assert shown not in (ACME, GLOBEX, NEW)
    assert [call.args[0] for call in compared.call_args_list] == [key.digest for key in KEYS]


TENANTS = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True) | st.text(max_size=12)
SALTS = st.text(st.sampled_from("012:acme") | st.characters(exclude_categories=["Cs"]), max_size=12)


@given(first=st.tuples(TENANTS, SALTS), second=st.tuples(TENANTS, SALTS))
def test_salts_are_equal_only_for_equal_pairs(first: tuple[str, str], second: tuple[str, str]) -> None:
    assert (salt_of(*first) == salt_of(*second)) == (first == second)


@given(tenant=TENANTS, salt=SALTS, cut=st.integers(0, 40))
def test_the_end_of_a_tenant_cannot_be_moved(tenant: str, salt: str, cut: int) -> None:
    """The same characters, divided elsewhere, or the whole as another tenant's own salt."""
    whole = tenant + salt
    other = whole[:cut], whole[cut:]
    assert (salt_of(*other) == salt_of(tenant, salt)) == (other == (tenant, salt))
    assert salt_of("mallory", salt_of(tenant, salt)) != salt_of(tenant, salt)


def test_the_pair_of_the_research() -> None:
    assert salt_of("org_1", "2345") != salt_of("org_12345", "")
    assert salt_of(None, "as it stands") == "as it stands"


def test_openai_s_client(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    with serving(create_app(backend, tokenizer, GatewaySettings(keys=KEYS))) as url:

        def client(key: str) -> OpenAI:
            return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)

        with client("sk-wrong") as wrong, pytest.raises(openai.AuthenticationError) as caught:
            wrong.models.list()
        assert caught.value.code == "invalid_api_key" and caught.value.request_id
        with client(GLOBEX) as right:
            assert [model.id for model in right.models.list()] == ["acme/tiny"]
            stream = right.completions.create(model="acme/tiny", prompt="hi", stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == "hello"
        assert backend.jobs[-1].tenant == "globex"
        large = httpx.post(f"{url}/v1/completions", content=b"x" * 4_000_000, trust_env=False)
        assert (large.status_code, large.json()["error"]["code"]) == (401, None)
