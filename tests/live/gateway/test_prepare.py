"""From fields of a request to the jobs a cluster gets."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app

from . import folder
from .fake import FakeBackend
from .inprocess import Poster

MESSAGES = [{"role": "user", "content": "hi"}]


def refused(response: Any, param: str, words: str) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


def test_a_chat_job(post: Poster, backend: FakeBackend) -> None:
    body = post.chat(user="ann", cache_salt="pepper", seed=5, temperature=0).json()
    [job] = backend.jobs
    assert job.request == f"{body['id']}-0"
    assert list(job.tokens) == [folder.BOS, *folder.byte_tokens("<user>hi\n<assistant>")]
    assert job.max_tokens == 256 - len(job.tokens)
    assert (job.tenant, job.salt) == ("ann", "pepper")
    assert (job.sampling.seed, job.sampling.temperature) == (5, 0)
    assert job.sampling.stop_tokens == (folder.EOS,)


def test_completion_jobs(post: Poster, backend: FakeBackend) -> None:
    body = post.complete(prompt=["a", "b"], n=2, seed=5).json()
    assert [job.request for job in backend.jobs] == [f"{body['id']}-{k}" for k in range(4)]
    assert [job.tokens for job in backend.jobs] == [(folder.BOS, 97)] * 2 + [(folder.BOS, 98)] * 2
    assert {job.max_tokens for job in backend.jobs} == {16}
    seeds = [job.sampling.seed for job in backend.jobs]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


def test_both_names_of_the_limit(post: Poster, backend: FakeBackend) -> None:
    post.chat(max_tokens=5)
    post.chat(max_completion_tokens=6)
    assert [job.max_tokens for job in backend.jobs] == [5, 6]
    assert post.chat(max_tokens=5, max_completion_tokens=5).status_code == 200
    refused(post.chat(max_tokens=5, max_completion_tokens=6), "max_tokens", "give only one")


def test_another_model(post: Poster) -> None:
    response = post.chat(model="other")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "The model 'other' does not exist; this server serves 'acme/tiny'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_too_long(post: Poster) -> None:
    response = post.complete(prompt=[1] * 256)
    refused(response, "prompt", "256 tokens")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    refused(post.chat(messages=[{"role": "user", "content": "x" * 300}]), "messages", "context length")
    refused(post.chat(max_completion_tokens=256), "max_completion_tokens", "Ask for at most")
    refused(post.complete(prompt=[1] * 250, max_tokens=7), "max_tokens", "Ask for at most 6")


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [[1], []]])
def test_empty_prompts(post: Poster, backend: FakeBackend, prompt: object) -> None:
    refused(post.complete(prompt=prompt), "prompt", "empty")
    assert backend.jobs == []


def test_ids_outside_the_vocabulary(post: Poster) -> None:
    refused(post.complete(prompt=[1, 300]), "prompt", "token id 300; this model's ids are 0 to 299")


def test_top_logprobs_need_logprobs(post: Poster) -> None:
    refused(post.chat(top_logprobs=2), "top_logprobs", "only with logprobs: true")
    refused(post.chat(top_logprobs=2, logprobs=False), "top_logprobs", "only with logprobs: true")


def test_too_many_answers(post: Poster) -> None:
    refused(post.complete(prompt=["a"] * 17, n=16), "prompt", "272 sequences; ask for at most 256")


def test_lists_have_a_limit_of_their_own(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    post = Poster(create_app(backend, tokenizer, GatewaySettings(max_messages=2, max_tools=1, max_depth=6)))
    assert post.chat(messages=MESSAGES * 2).status_code == 200
    refused(
        post.chat(messages=MESSAGES * 3), "messages", "3 entries; this server takes up to 2 (limits.messages)"
    )
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    refused(post.chat(tools=tools), "tools", "2 entries; this server takes up to 1 (limits.tools)")
    assert post.chat(metadata={"a": [[["]]]]"]]]}).status_code == 200
    assert (
        "deeper than 6 (limits.json_depth)" in post.chat(metadata={"a": [[[[[0]]]]]}).json()["error"]["message"]
    )
    assert len(backend.jobs) == 2


def test_a_text_that_must_be_too_long_is_not_tokenised(
    post: Poster, tokenizer: GatewayTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> list[int]:
        raise AssertionError("tokenised")

    text = "x" * 15_000
    refused(post.complete(prompt=text, truncate_prompt_tokens=10, max_tokens=0), "max_tokens", "echo")
    monkeypatch.setattr(tokenizer, "encode_text", fail)
    refused(post.complete(prompt=text), "prompt", "has 15000 characters, which are at least")
    refused(
        post.chat(messages=[{"role": "user", "content": text}]), "messages", "characters, which are at least"
    )
