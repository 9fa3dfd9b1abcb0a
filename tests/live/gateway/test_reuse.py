"""KV of other prompts: who asks for it, who is refused, and what the answer says was done."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import msgspec
import pytest

from isthmus.core.errors import RequestError, UnavailableError
from isthmus.core.types import Reuse, Reused
from isthmus.live.gateway import GatewaySettings
from isthmus.live.gateway.headers import RequestTerms, reuse_of
from isthmus.live.gateway.settings import ApiKey

from . import folder
from .fake import CARD, FakeBackend, Step, fitting, says
from .inprocess import Poster, Served, events_of

HEADER = "x-isthmus-reuse"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
KEYS = tuple(ApiKey(name, hashlib.sha256(f"sk-{name}".encode()).digest()) for name in ("acme", "globex"))
SETTINGS: Any = {"keys": KEYS, "reuse": Reuse.CHUNKS, "tenant_reuse": {"acme": Reuse.SEMANTIC}}
FIXED = msgspec.structs.replace(CARD, no_reuse="Mamba has recurrent layers")
EXACT, CHUNKS, SEMANTIC = Reuse


def ask(post: Poster, path: str, reuse: str | None = None, key: str = "", **fields: Any) -> httpx.Response:
    headers = {HEADER: reuse} if reuse is not None else {}
    if key:
        headers["Authorization"] = f"Bearer sk-{key}"
    return post.request("POST", path, json=BODIES[path] | fields, headers=headers)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        (RequestTerms(tenant="acme"), SEMANTIC),
        (RequestTerms(tenant="acme", reuse=EXACT), EXACT),
        (RequestTerms(tenant="acme", reuse=CHUNKS), CHUNKS),
        (RequestTerms(tenant="globex"), CHUNKS),
        (RequestTerms(tenant="globex", reuse=SEMANTIC), SEMANTIC),
        (RequestTerms(), CHUNKS),
    ],
)
def test_the_header_goes_before_the_tenant_and_the_tenant_before_the_default(
    terms: RequestTerms, expected: Reuse
) -> None:
    assert reuse_of(terms, "", GatewaySettings(**SETTINGS), CARD) is expected
    assert reuse_of(terms, "", GatewaySettings(), CARD) is (terms.reuse or EXACT)


def test_a_tenant_is_known_by_its_key(backend: FakeBackend, served: Served) -> None:
    """And told of what its own setting did."""
    backend.script = lambda _: hello()
    post = served(**SETTINGS)
    for key, reuse in (("acme", None), ("globex", None), ("acme", "exact"), ("globex", "semantic")):
        answered = ask(post, "/v1/completions", reuse, key, user="acme", prompt=PROMPT)
        told = answered.json()["usage"]["prompt_tokens_details"]
        assert told == {"cached_tokens": 1} | ({} if reuse == "exact" else SUMS)
    assert [job.reuse for job in backend.jobs] == [SEMANTIC, CHUNKS, EXACT, SEMANTIC]


@pytest.mark.parametrize("reuse", [CHUNKS, SEMANTIC])
def test_a_model_that_cannot_refuses_the_header_and_overrides_settings(reuse: Reuse) -> None:
    with pytest.raises(RequestError) as caught:
        reuse_of(RequestTerms(reuse=reuse), "", GatewaySettings(), FIXED)
    message = "the header 'x-isthmus-reuse' can only be exact here: Mamba has recurrent layers"
    assert (str(caught.value), caught.value.param) == (message, HEADER)
    settings = GatewaySettings(reuse=reuse, tenant_reuse={"acme": reuse})
    for terms in (RequestTerms(), RequestTerms(tenant="acme"), RequestTerms(reuse=EXACT)):
        assert reuse_of(terms, "", settings, FIXED) is EXACT


@pytest.mark.parametrize("path", BODIES)
def test_refused_over_http(backend: FakeBackend, served: Served, path: str) -> None:
    backend.card = FIXED
    post = served(reuse=SEMANTIC)
    refused = ask(post, path, "semantic")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, HEADER)
    assert FIXED.no_reuse in refused.json()["error"]["message"] and not backend.jobs
    answered = ask(post, path)
    assert answered.status_code == 200 and "moved_tokens" not in answered.text
    assert [job.reuse for job in backend.jobs] == [EXACT] and not backend.waits_before_reuse


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/completions", {"prompt_logprobs": 0}, "'prompt_logprobs'"),
        ("/v1/chat/completions", {"prompt_logprobs": 1}, "'prompt_logprobs'"),
        ("/v1/completions", {"echo": True, "logprobs": 1}, "'echo' with 'logprobs'"),
        ("/v1/completions", {"echo": True, "logprobs": 1, "max_tokens": 0}, "'echo' with 'logprobs'"),
    ],
)
def test_prompts_that_are_scored_are_exact(
    backend: FakeBackend, served: Served, path: str, fields: dict[str, Any], named: str
) -> None:
    backend.script = fitting
    post = served(reuse=SEMANTIC)
    refused = ask(post, path, "chunks", **fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, HEADER)
    assert error["message"].startswith(
        f"{named} and the header 'x-isthmus-reuse: chunks' contradict each other"
    )
    for reuse in (None, "exact"):
        answered = ask(post, path, reuse, **fields)
        assert answered.status_code == 200 and "moved_tokens" not in answered.text
    assert [job.reuse for job in backend.jobs] == [EXACT, EXACT]


def test_the_backend_is_ready_before_any_job_and_only_where_it_matters(
    post: Poster, backend: FakeBackend
) -> None:
    asked: list[tuple[str | None, int]] = [(None, 1), ("exact", 1), ("semantic", 3), ("chunks", 1)]
    for reuse, num_choices in asked:
        assert ask(post, "/v1/completions", reuse, n=num_choices).status_code == 200
    assert backend.waits_before_reuse == [2, 5], "once a request, before its jobs"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_backend_that_cannot_get_ready_is_503(
    post: Poster, backend: FakeBackend, path: str, stream: bool
) -> None:
    backend.not_ready = UnavailableError("no node is here that could say")
    failed = ask(post, path, "semantic", stream=stream)
    error = failed.json()["error"]
    assert (failed.status_code, error["code"], error["message"]) == (503, "unavailable", str(backend.not_ready))
    assert not backend.jobs
    metrics = post.get("/metrics").text
    assert 'isthmus_requests_failed_total{status="503"} 1.0' in metrics
    assert "isthmus_num_requests_running 0.0" in metrics
    assert ask(post, path).status_code == 200


MOVED = Reused(exact=1, moved=2, similar=3, recomputed=4)
PROMPT = list(range(3, 13))
SUMS = {"exact_tokens": 1, "moved_tokens": 2, "similar_tokens": 3, "recomputed_tokens": 4}


def hello(*, reused: Reused | None = MOVED) -> list[Step]:
    return says([*folder.byte_tokens("hello"), folder.EOS], cached_tokens=1, reused=reused)


def test_before_the_first_token_all_is_to_be_computed(post: Poster, backend: FakeBackend) -> None:
    """Of a second prompt that has not begun when the first is told of."""
    backend.script = lambda job: hello() if len(job.tokens) == len(PROMPT) else [[], *hello(reused=None)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": [PROMPT, PROMPT[:4]], "stream": True, "stream_options": options}
    first, *_, last = events_of(ask(post, "/v1/completions", "chunks", **asked))
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 1, **SUMS, "recomputed_tokens": 8}
    assert json.dumps(SUMS | {"exact_tokens": 2, "recomputed_tokens": 7})[1:-1] in json.dumps(last)


def test_tokens_are_counted_with_their_prompts(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: hello()
    ask(post, "/v1/completions", "semantic", prompt=PROMPT, n=3)
    backend.script = lambda _: hello(reused=None)
    ask(post, "/v1/completions", prompt=PROMPT)
    told = post.get("/metrics").text
    for name, count in (("", 20), ("_cached", 2), ("_moved", 2), ("_similar", 3)):
        assert f"isthmus_prompt_tokens{name}_total {count}.0" in told


@pytest.mark.parametrize(("card", "words"), [(CARD, ["exact", "chunks", "semantic"]), (FIXED, ["exact"])])
def test_the_document_has_the_header(backend: FakeBackend, served: Served, card: Any, words: list[str]) -> None:
    backend.card = card
    document = served().get("/openapi.json").json()
    for path in BODIES:
        [header] = [each for each in document["paths"][path]["post"]["parameters"] if each["name"] == HEADER]
        assert header["in"] == "header" and header["schema"]["enum"] == words
    assert "parameters" not in document["paths"]["/tokenize"]["post"]
    for name in ("PromptDetails", "InputDetails"):
        schema = document["components"]["schemas"][name]
        assert SUMS.keys() <= schema["properties"].keys()
        assert schema["required"] == ["cached_tokens"]
