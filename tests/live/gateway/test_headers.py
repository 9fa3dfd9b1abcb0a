"""What a request says before its body: its key, its id, the page it comes from, its terms."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI
from starlette.types import Message, Scope

from isthmus.core.errors import RequestError
from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app
from isthmus.live.gateway import headers as module
from isthmus.live.gateway.headers import REUSE, ApiKeys, RequestTerms, salt_of, tenant_of, terms_of
from isthmus.live.gateway.http import HttpError
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
        except HttpError:
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


def echoed(post: Poster, sent: str, path: str = "/health") -> str:
    return post.request("GET", path, headers={"X-Request-Id": sent}).headers["x-request-id"]


@pytest.mark.parametrize("sent", ["a", "job-7_b.C", "x" * 128])
def test_the_client_s_id_comes_back(post: Poster, sent: str) -> None:
    assert echoed(post, sent) == sent
    assert echoed(post, sent, "/no/such/route") == sent


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "a\tb", "{}"])
def test_unfair_ids_are_replaced(post: Poster, sent: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", echoed(post, sent))


def test_without_one_it_is_the_answer_s(post: Poster) -> None:
    response = post.chat()
    assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"


def test_the_cluster_s_names_stay_unique_when_a_client_s_id_comes_twice(post: Poster) -> None:
    headers = {"X-Request-Id": "again"}
    body = {"model": "acme/tiny", "prompt": "hi"}
    answers = [post.request("POST", "/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["again", "again"]
    assert answers[0].json()["id"] != answers[1].json()["id"]


CHAT = "/v1/chat/completions"
HERE, THERE = "http://localhost:3000", "https://site.example"
PAGE_KEYS = (ApiKey("acme", hashlib.sha256(b"secret").digest()),)


@pytest.fixture
def page_keyed(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Poster:
    return Poster(create_app(backend, tokenizer, GatewaySettings(keys=PAGE_KEYS)))


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


def test_where_keys_are_asked_for_any_page_may_show_one(page_keyed: Poster, backend: FakeBackend) -> None:
    allowed = preflight(page_keyed, THERE)
    assert allowed.status_code == 200 and is_shown(allowed, THERE) and not backend.jobs
    for key, status in (("", 401), ("wrong", 401), ("secret", 200)):
        answer = chat(page_keyed, THERE, key)
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


NAMES = ("x-isthmus-slo-ttft-ms", "x-isthmus-slo-tbt-ms", "x-isthmus-priority")


def terms(*headers: tuple[bytes, bytes]) -> RequestTerms:
    return terms_of({"type": "http", "headers": list(headers)})


@pytest.mark.parametrize(("name", "value"), [(NAMES[2], b"1"), (REUSE, b"exact")])
def test_a_header_given_twice_is_refused(name: str, value: bytes) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is given 2 times"):
        terms((name.encode(), value), (name.encode(), value))
