"""A Responses body says what a chat completion says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ..fake import FakeBackend
from ..inprocess import Poster

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {}),
        ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
        ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        *(
            (same, same)
            for same in (
                {"temperature": 0.5, "top_p": 0.5, "seed": 3, "top_k": 4, "min_p": 0.25},
                {"user": "u", "cache_salt": "s", "min_tokens": 2, "ignore_eos": True, "logit_bias": {"5": 1}},
                {"guided_regex": "a+", "bad_words": ["no"], "repetition_penalty": 1.5},
            )
        ),
    ],
)
def test_the_same_job(post: Poster, backend: FakeBackend, fields: dict[str, Any], chat: dict[str, Any]) -> None:
    seeded = {"seed": 1} | fields, {"seed": 1} | chat
    post.post(PATH, instructions="Be brief.", input="hi", **seeded[0])
    post.chat(messages=MESSAGES, **seeded[1])
    ours, theirs = (msgspec.structs.replace(job, request="") for job in backend.jobs)
    assert ours == theirs
    assert backend.jobs[0].request.startswith("resp_")


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


LONG = [said("system", "S"), *(said(role, f"{n}" * 20) for n in range(8) for role in ("user", "assistant"))]


def prompt(backend: FakeBackend) -> str:
    return bytes(token for token in backend.jobs[-1].tokens if token < 256).decode()


def test_turns_are_dropped_where_the_client_allows_it(post: Poster, backend: FakeBackend) -> None:
    asked = [*LONG, said("user", "?")]
    refused = post.post(PATH, input=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert post.post(PATH, input=asked, truncation="auto", max_output_tokens=20).status_code == 200
    shown = prompt(backend)
    assert shown.startswith("<system>S\n<user>")
    assert shown.endswith("<user>?\n<assistant>")
    # A whole turn more would not have fitted.
    turn = len("<user>\n<assistant>\n") + 40
    assert 256 - 20 - turn < len(backend.jobs[-1].tokens) <= 256 - 20


def test_a_turn_that_is_too_long_by_itself(post: Poster, backend: FakeBackend) -> None:
    for asked in ([said("user", "x" * 300)], [*LONG, said("user", "x" * 300)]):
        refused = post.post(PATH, input=asked, truncation="auto")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input"
    assert not backend.jobs
