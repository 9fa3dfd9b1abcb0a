"""Which KV a request may be computed with, from the header or its tenant to the job, and what the reply says of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from isthmus.config import key_digest
from isthmus.errors import RequestError, UnavailableError
from isthmus.gateway import GatewayTokenizer, create_app
from isthmus.gateway.settings import ApiKey, GatewaySettings
from isthmus.gateway.terms import REUSE, Terms, terms_of
from isthmus.types import FinishReason, Job, Reuse, Reused

from . import folder
from .fake import CARD, FakeBackend, Step, says
from .inprocess import Poster, events_of

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
FIELDS = ("exact_tokens", "moved_tokens", "similar_tokens", "recomputed_tokens")


def ask(post: Poster, path: str, value: str | None, **fields: Any) -> Any:
    headers = {} if value is None else {REUSE: value}
    return post.request("POST", path, json={"model": "acme/tiny"} | BODIES[path] | fields, headers=headers)


def assembled(*reused: Reused | None) -> Any:
    """A script: the n-th job's prompt was put together so; two tokens of each are exact."""

    def script(job: Job) -> list[Step]:
        steps: list[Any] = says([97, 98], FinishReason.LENGTH, cached_tokens=2)
        of = reused[int(job.request.rpartition("-")[2])]
        return [[msgspec.structs.replace(each, reused=of if not at else None) for each in step]
                for at, step in enumerate(steps)]  # fmt: skip

    return script


def terms(*values: bytes) -> Terms:
    return terms_of({"type": "http", "headers": [(REUSE.encode(), value) for value in values]})


@pytest.mark.parametrize("reuse", list(Reuse))
def test_the_header_is_read(reuse: Reuse) -> None:
    assert terms(f" {reuse} ".encode()) == Terms(reuse=reuse)


@pytest.mark.parametrize("value", [b"", b"Chunks", b"semantics", b"yes", b"\xff", b"exact,chunks"])
def test_what_it_does_not_know_is_refused_with_what_it_does(value: bytes) -> None:
    with pytest.raises(
        RequestError, match="'x-isthmus-reuse' must be one of exact, chunks, semantic"
    ) as caught:
        terms(value)
    assert caught.value.param == REUSE
    with pytest.raises(RequestError, match="given 2 times"):
        terms(b"exact", b"exact")


@pytest.mark.parametrize("path", list(BODIES))
def test_it_reaches_the_job_after_the_cluster_is_ready_for_it(
    post: Poster, backend: FakeBackend, path: str
) -> None:
    for value, found in ((None, "exact"), ("exact", "exact"), ("chunks", "chunks"), ("semantic", "semantic")):
        assert ask(post, path, value).status_code == 200
        assert backend.jobs[-1].reuse == found
    assert backend.num_readied == 2, "who does not ask for it waits for nothing"
    wrong = ask(post, path, "some")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == REUSE
    assert len(backend.jobs) == 4


def test_a_cluster_that_cannot_get_ready_is_an_answer(post: Poster, backend: FakeBackend) -> None:
    backend.unready = UnavailableError("nobody knows what prompts mean")
    reply = ask(post, "/v1/completions", "semantic", stream=True)
    assert reply.status_code == 503 and "nobody knows" in reply.json()["error"]["message"]
    assert not backend.jobs


def test_tenants_have_settings_which_a_header_overrides(
    backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    keys = tuple(ApiKey(name, bytes.fromhex(key_digest(name))) for name in ("acme", "globex"))
    settings = GatewaySettings(keys=keys, reuse=Reuse.CHUNKS, tenant_reuse={"acme": Reuse.SEMANTIC})
    post = Poster(create_app(backend, tokenizer, settings))
    for tenant, value, found in (
        ("acme", None, "semantic"),
        ("globex", None, "chunks"),
        ("acme", "exact", "exact"),
        ("globex", "semantic", "semantic"),
    ):
        headers = {"Authorization": f"Bearer {tenant}"} | ({REUSE: value} if value else {})
        body = {"model": "acme/tiny", "prompt": "hi"}
        assert post.request("POST", "/v1/completions", json=body, headers=headers).status_code == 200
        assert backend.jobs[-1].reuse == found


def test_what_cannot_be_is_refused_to_who_asks_and_exact_to_whom_it_is_given(
    backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    backend.card = msgspec.structs.replace(CARD, no_reuse="states hold at one position only")
    post = Poster(create_app(backend, tokenizer, GatewaySettings(reuse=Reuse.SEMANTIC)))
    for path in BODIES:
        assert ask(post, path, None).status_code == ask(post, path, "exact").status_code == 200
        reply = ask(post, path, "chunks")
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].endswith("must be exact: states hold at one position only")
    assert {job.reuse for job in backend.jobs} == {Reuse.EXACT}
    assert backend.num_readied == 0
    assert _allowed(post) == ["exact"]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_a_prompt_that_is_scored_is_computed(
    post: Poster, backend: FakeBackend, fields: dict[str, Any]
) -> None:
    reply = ask(post, "/v1/completions", "chunks", **fields)
    assert reply.status_code == 400 and "prompt_logprobs" in reply.json()["error"]["message"]
    assert not backend.jobs


def test_the_document_has_the_header(post: Poster) -> None:
    assert _allowed(post) == ["exact", "chunks", "semantic"]


def _allowed(post: Poster) -> list[str]:
    described = post.get("/openapi.json").json()["paths"]["/v1/completions"]["post"]["parameters"]
    [found] = [each["schema"] for each in described if each["name"] == REUSE]
    return list(found["enum"])


def test_usage_says_where_the_kv_came_from(post: Poster, backend: FakeBackend) -> None:
    """Of each prompt once, as its first choice has it; one on the normal path was computed, but for its prefix."""
    backend.script = assembled(Reused(2, 3, 1, 0), Reused(2, 0, 0, 4), None, None)
    prompts = [folder.byte_tokens("abcdef"), folder.byte_tokens("ghijk")]
    usage = ask(post, "/v1/completions", "semantic", prompt=prompts, n=2).json()["usage"]
    found = usage["prompt_tokens_details"]
    assert found == {"cached_tokens": 4} | dict(zip(FIELDS, (4, 3, 1, 3), strict=True))
    assert sum(found[field] for field in FIELDS) == usage["prompt_tokens"]


def test_usage_of_a_stream_and_of_a_response(post: Poster, backend: FakeBackend) -> None:
    backend.script = assembled(Reused(2, 0, 4, 1))
    options = {
        "prompt": folder.byte_tokens("abcdefg"),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    streamed = events_of(ask(post, "/v1/completions", "semantic", **options))[-1]["usage"]
    expected = {"cached_tokens": 2} | dict(zip(FIELDS, (2, 0, 4, 1), strict=True))
    assert streamed["prompt_tokens_details"] == expected
    details = ask(post, "/v1/responses", "semantic").json()["usage"]["input_tokens_details"]
    assert details == expected | {"cache_write_tokens": 0}


def test_an_exact_reply_says_nothing_more(post: Poster, backend: FakeBackend) -> None:
    backend.script = assembled(None)
    details = ask(post, "/v1/completions", None).json()["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 2}


def test_a_further_attempt_changes_nothing_of_it(post: Poster, backend: FakeBackend) -> None:
    """It has the answer so far in its cache, too, which is no part of the prompt."""

    def script(job: Job) -> list[Any]:
        first, second = assembled(Reused(0, 2, 0, 0))(job)
        return [first, [msgspec.structs.replace(second[0], cached_tokens=50)]]

    backend.script = script
    details = ask(post, "/v1/completions", "chunks").json()["usage"]["prompt_tokens_details"]
    assert [details[field] for field in FIELDS] == [0, 2, 0, 0]


def test_metrics_count_it(post: Poster, backend: FakeBackend) -> None:
    backend.script = assembled(Reused(2, 3, 1, 0))
    ask(post, "/v1/completions", "semantic", prompt=folder.byte_tokens("abcdef"))
    text = post.get("/metrics").text
    assert "isthmus_prompt_tokens_moved_total 3.0" in text
    assert "isthmus_prompt_tokens_similar_total 1.0" in text
