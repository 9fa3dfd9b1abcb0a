"""The exact shape of chat answers."""

from __future__ import annotations

import re

from isthmus.core.types import FinishReason

from . import folder
from .fake import FakeBackend, says, with_logprobs
from .inprocess import Poster, events_of

HELLO = [*folder.byte_tokens("hello"), folder.EOS]
PROMPT = [folder.BOS, *folder.byte_tokens("<user>hi\n<assistant>")]


def test_answer(post: Poster) -> None:
    body = post.chat().json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body.pop("id"))
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "acme/tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 6,
            "total_tokens": len(PROMPT) + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_stream(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(folder.byte_tokens("hey"), FinishReason.LENGTH, per_batch=2)
    events = events_of(post.chat(stream=True))
    assert {event["id"] for event in events} == {events[0]["id"]}
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert event["model"] == "acme/tiny"
        assert "usage" not in event
        assert "prompt_token_ids" not in event
    assert [event["choices"] for event in events] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "he"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "y"}, "logprobs": None, "finish_reason": "length"}],
    ]


def test_stream_with_usage(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(HELLO, cached_tokens=16)
    events = events_of(post.chat(stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "total_tokens": len(PROMPT) + 6,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_logprobs(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: with_logprobs(says([ord("a"), 0xE2, folder.EOS]), num_top=2)
    choice = post.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    top = [
        {"token": "\x00", "logprob": 0.0, "bytes": [0]},
        {"token": "\x01", "logprob": -0.125, "bytes": [1]},
    ]
    eos = list(b"<eos>")
    assert choice["logprobs"] == {
        "content": [
            {"token": "a", "logprob": -12.125, "bytes": [97], "top_logprobs": top},
            {"token": "\\xe2", "logprob": -0xE2 / 8, "bytes": [0xE2], "top_logprobs": top},
            {"token": "<eos>", "logprob": -folder.EOS / 8, "bytes": eos, "top_logprobs": top},
        ],
        "refusal": None,
    }
    assert backend.jobs[0].sampling.logprobs == 2


def test_logprobs_in_a_stream_come_with_their_tokens(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: with_logprobs(says([*folder.byte_tokens("é"), folder.EOS]), num_top=0)
    events = events_of(post.chat(stream=True, logprobs=True))
    choices = [event["choices"][0] for event in events[1:]]
    assert [choice["delta"] for choice in choices] == [{}, {"content": "é"}, {}]
    assert [[s["token"] for s in choice["logprobs"]["content"]] for choice in choices] == [
        ["\\xc3"],
        ["\\xa9"],
        ["<eos>"],
    ]


def test_token_ids(post: Poster) -> None:
    body = post.chat(return_token_ids=True).json()
    assert body["prompt_token_ids"] == PROMPT
    assert body["choices"][0]["token_ids"] == HELLO


def test_token_ids_in_a_stream(post: Poster, backend: FakeBackend) -> None:
    tokens = [*folder.byte_tokens("é!"), folder.EOS]
    backend.script = lambda _: says(tokens)
    events = events_of(post.chat(stream=True, n=2, return_token_ids=True))
    assert events[0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in event for event in events[1:])
    for index in range(2):
        ids = []
        for choice in (event["choices"][0] for event in events):
            if choice["index"] == index:
                ids += choice.get("token_ids", [])
        assert ids == tokens


def test_choices_interleave(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda job: says(folder.byte_tokens("abc" if job.request.endswith("-0") else "xyz"))
    choices = [event["choices"][0] for event in events_of(post.chat(stream=True, n=2))]
    assert [choice["index"] for choice in choices[:4]] == [0, 0, 1, 1]
    for index, text in ((0, "ab"), (1, "xy")):  # the token that ends an answer gives no text
        assert "".join(c["delta"].get("content", "") for c in choices if c["index"] == index) == text
