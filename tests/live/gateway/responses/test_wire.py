"""The exact shape of answers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from isthmus.core.errors import IsthmusError, OverloadedError, UnavailableError
from isthmus.core.types import FinishReason
from isthmus.live.gateway import GatewayTokenizer, create_app

from .. import folder
from ..fake import FakeBackend, says, with_logprobs
from ..inprocess import Poster
from .events import BEGINNING, DELTA, MESSAGE_BEGUN, MESSAGE_DONE, kinds, read_events

HELLO = [*folder.byte_tokens("hello"), folder.EOS]
PATH = "/v1/responses"


def test_answer(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(HELLO, cached_tokens=16)
    body = post.post(PATH, input="hi").json()
    Response.model_validate(body)
    found = re.fullmatch(r"resp_([0-9a-f]{32})", body.pop("id"))
    assert found
    assert body.pop("completed_at") >= body.pop("created_at") > 1_700_000_000
    prompt = len([folder.BOS, *"<user>hi\n<assistant>"])
    assert body == {
        "object": "response",
        "model": "acme/tiny",
        "status": "completed",
        "output": [
            {
                "id": f"msg_{found[1]}_0",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
            }
        ],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + 6,
        },
        "error": None,
        "incomplete_details": None,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


def test_what_was_asked_for_is_repeated(post: Poster) -> None:
    schema = {"type": "object"}
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 40,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "any", "schema": schema}, "verbosity": "low"},
        "tool_choice": "none",
        "top_logprobs": 0,
        "top_p": 0.25,
        "truncation": "auto",
        "user": "u",
    }
    body = post.post(PATH, input="hi", store=True, service_tier="flex", **asked).json()
    Response.model_validate(body)
    changed = {"reasoning": {"effort": "low", "summary": None}}
    assert {name: body[name] for name in asked} == asked | changed


def test_cut_by_the_limit(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda job: says(folder.byte_tokens("hello")[: job.max_tokens], FinishReason.LENGTH)
    body = post.post(PATH, input="hi", max_output_tokens=3).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["completed_at"] is None
    assert body["output"][0]["status"] == "incomplete"
    *_, item_done, last = read_events(post.post(PATH, input="hi", max_output_tokens=3, stream=True))
    assert (item_done.type, item_done.item.status) == ("response.output_item.done", "incomplete")
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.usage.output_tokens == 3


def test_stream(post: Poster) -> None:
    events = read_events(post.post(PATH, input="hi", stream=True))
    deltas = [DELTA] * 5
    assert kinds(events) == [*BEGINNING, *MESSAGE_BEGUN, *deltas, *MESSAGE_DONE, "response.completed"]
    assert [event.delta for event in events if event.type == DELTA] == list("hello")
    assert events[0].response.output == []
    assert events[0].response.status == "in_progress"
    assert events[-1].response.output_text == "hello"
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_an_answer_of_nothing(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says([folder.EOS])
    [item] = post.post(PATH, input="hi").json()["output"]
    assert item["content"][0]["text"] == ""
    events = read_events(post.post(PATH, input="hi", stream=True))
    assert kinds(events) == [*BEGINNING, *MESSAGE_BEGUN, *MESSAGE_DONE, "response.completed"]


@pytest.mark.parametrize(
    "fields", [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"top_logprobs": 2}]
)
def test_logprobs(post: Poster, backend: FakeBackend, fields: dict[str, object]) -> None:
    backend.script = lambda _: with_logprobs(says([ord("a"), folder.EOS]), num_top=2)
    [part] = post.post(PATH, input="hi", **fields).json()["output"][0]["content"]
    top = [
        {"token": "\x00", "logprob": 0.0, "bytes": [0]},
        {"token": "\x01", "logprob": -1 / 8, "bytes": [1]},
    ]
    assert part["logprobs"][0] == {"token": "a", "logprob": -97 / 8, "bytes": [97], "top_logprobs": top}
    events = read_events(post.post(PATH, input="hi", stream=True, **fields))
    streamed = [each.token for event in events if event.type == DELTA for each in event.logprobs]
    assert streamed == [each["token"] for each in part["logprobs"]]
    assert backend.jobs[0].sampling.logprobs == 2


def test_logprobs_without_likely_ones(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: with_logprobs(says([ord("a"), folder.EOS]), num_top=0)
    body = post.post(PATH, input="hi", include=["message.output_text.logprobs"]).json()
    assert [each["top_logprobs"] for each in body["output"][0]["content"][0]["logprobs"]] == [[], []]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UnavailableError("node lost"), "server_error", "node lost"),
        (OverloadedError("full", retry_after_s=1), "rate_limit_exceeded", "full"),
        (ValueError("secret"), "server_error", "internal error; the server's log says more"),
    ],
)
def test_an_error_in_a_stream(
    post: Poster, backend: FakeBackend, error: Exception, code: str, message: str
) -> None:
    backend.script = lambda _: [*says(folder.byte_tokens("ab"), finish=None), error]
    events = read_events(post.post(PATH, input="hi", stream=True))
    assert kinds(events)[-4:] == [*MESSAGE_DONE, "response.failed"]
    response = events[-1].response
    assert (response.status, response.error.code, response.error.message) == ("failed", code, message)
    assert response.output_text == "ab"
    assert response.output[0].status == "incomplete"


def test_an_error_before_the_first_token_has_its_status(post: Poster, backend: FakeBackend) -> None:
    errors: list[IsthmusError] = [OverloadedError("full", retry_after_s=3), UnavailableError("none")]
    for error in errors:
        backend.script = lambda _, error=error: [error]
        assert post.post(PATH, input="hi", stream=True).status_code == error.http_status


@given(st.lists(st.binary(max_size=6), max_size=8), st.sampled_from(FinishReason), st.booleans())
def test_the_stream_is_the_answer_in_pieces(
    tokenizer: GatewayTokenizer, batches: list[bytes], finish: FinishReason, scores: bool
) -> None:
    tokens = [token for batch in batches for token in batch] + [folder.EOS]
    steps = with_logprobs(says(tokens, finish, per_batch=3), num_top=1)
    post = Poster(create_app(FakeBackend(lambda _: steps), tokenizer))
    fields = {"input": "hi", "stop": ["x!"], "top_logprobs": int(scores)}
    whole = Response.model_validate(post.post(PATH, **fields).json())
    events = read_events(post.post(PATH, stream=True, **fields))
    [message] = whole.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    deltas = [event for event in events if event.type == DELTA]
    assert "".join(event.delta for event in deltas) == part.text
    logprobs = [each.model_dump() for event in deltas for each in event.logprobs]
    assert logprobs == [each.model_dump() for each in part.logprobs or ()]
    own = {"id", "created_at", "completed_at"}
    last = events[-1].response.model_dump(exclude=own)
    assert last["output"][0].pop("id") != message.id
    first = whole.model_dump(exclude=own)
    del first["output"][0]["id"]
    assert last == first
