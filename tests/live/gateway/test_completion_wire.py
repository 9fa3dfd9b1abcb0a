"""The exact shape of completion answers."""

from __future__ import annotations

import re

from isthmus.core.types import FinishReason

from . import folder
from .fake import FakeBackend, says, with_logprobs
from .inprocess import Poster, events_of

PROMPT = [folder.BOS, *folder.byte_tokens("hi")]


def test_answer(post: Poster) -> None:
    body = post.complete().json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body.pop("id"))
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": "acme/tiny",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_stream(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(folder.byte_tokens("hé"), FinishReason.LENGTH)
    events = events_of(post.complete(stream=True))
    assert all(event["object"] == "text_completion" and "usage" not in event for event in events)
    # The first byte of the two-byte character has nothing to show, so it is no event.
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": "h", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "é", "logprobs": None, "finish_reason": "length"}],
    ]


def test_stream_with_usage(post: Poster) -> None:
    events = events_of(post.complete(stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 9


def test_logprobs(post: Poster, backend: FakeBackend) -> None:
    tokens = [*folder.byte_tokens("aé"), folder.EOS]
    backend.script = lambda _: with_logprobs(says(tokens), num_top=2)
    choice = post.complete(logprobs=2).json()["choices"][0]
    top = {"\x00": 0.0, "\x01": -0.125}
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "<eos>"],
        "token_logprobs": [-token / 8 for token in tokens],
        "top_logprobs": [
            top | {"a": -12.125},
            top | {"bytes:\\xc3": -0xC3 / 8},
            top | {"bytes:\\xa9": -0xA9 / 8},
            top | {"<eos>": -folder.EOS / 8},
        ],
        "text_offset": [0, 1, 1, 2],
    }


def test_logprobs_zero_gives_the_chosen_token_only(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: with_logprobs(says([97], FinishReason.LENGTH), num_top=0)
    choice = post.complete(logprobs=0).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -12.125}]
    assert backend.jobs[0].sampling.logprobs == 0


def test_text_offsets_run_on_in_a_stream(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: with_logprobs(says(folder.byte_tokens("abcd"), per_batch=2), num_top=0)
    events = events_of(post.complete(stream=True, logprobs=0))
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0, 1], [2, 3]]


def test_token_ids(post: Poster) -> None:
    choice = post.complete(return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == [*folder.byte_tokens("hello"), folder.EOS]


def test_token_ids_in_a_stream(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says([0xC3, 0xA9], FinishReason.LENGTH)
    first, second = events_of(post.complete(stream=True, prompt=[1, 2], return_token_ids=True))
    assert first["choices"][0]["prompt_token_ids"] == [1, 2]
    assert first["choices"][0]["token_ids"] == [0xC3]
    assert first["choices"][0]["text"] == ""
    assert "prompt_token_ids" not in second["choices"][0]
    assert second["choices"][0]["token_ids"] == [0xA9]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(post: Poster, backend: FakeBackend) -> None:
    """Each answer repeats the first token of its prompt and adds its number."""
    backend.script = lambda job: says(
        [job.tokens[0], ord(job.request[-1])], FinishReason.LENGTH, cached_tokens=1
    )
    prompts = [folder.byte_tokens("a"), folder.byte_tokens("bcd")]
    body = post.complete(prompt=prompts, n=2).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a0"), (1, "a1"), (2, "b2"), (3, "b3")]
    # Each prompt counts once, with its cached token; each answer counts.
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }

    events = events_of(post.complete(prompt=prompts, n=2, stream=True))
    texts = dict.fromkeys(range(4), "")
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "a0", 1: "a1", 2: "b2", 3: "b3"}
