"""Fields of other servers, from the body to the job and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from isthmus.core.types import FinishReason, Generated, Job, TokenLogprobs

from . import folder
from .fake import FakeBackend, Step, says, with_logprobs
from .inprocess import Poster, events_of

PROMPT = [folder.BOS, *folder.byte_tokens("hi")]


def scored(job: Job, answer: Sequence[int] = (97,)) -> list[Step]:
    """`answer` behind a prompt whose every token t has log-probability -t/8 and rank t."""
    sampling = job.sampling
    steps = says(answer, FinishReason.LENGTH)
    if sampling.logprobs is not None:
        steps = with_logprobs(steps, sampling.logprobs)
    if sampling.prompt_logprobs is None:
        return steps
    top = tuple((token, -token / 8) for token in range(sampling.prompt_logprobs))
    scores = tuple(TokenLogprobs(-token / 8, top, token) for token in job.tokens[1:])
    first = steps[0][0]
    assert isinstance(first, Generated)
    return [[Generated(0, first.token, first.finish, first.logprobs, 0, scores)], *steps[1:]]


def test_the_sampling_of_a_job(post: Poster, backend: FakeBackend) -> None:
    post.complete(
        min_tokens=3, allowed_token_ids=[5, 5, 6], bad_words=["hi"], repeat_penalty=1.5, prompt_logprobs=None
    )
    sampling = backend.jobs[0].sampling
    assert sampling.min_tokens == 3
    assert sampling.allowed_tokens == (5, 6)
    assert sampling.bad_words == (
        tuple(folder.byte_tokens("hi")),
        tuple(folder.byte_tokens(" hi")),
    )
    assert sampling.repetition_penalty == 1.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_refusals(post: Poster, backend: FakeBackend, fields: dict[str, Any], param: str) -> None:
    response = post.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not backend.jobs


def test_usage_so_far_in_every_event(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(folder.byte_tokens("abc"), FinishReason.LENGTH)
    options = {"include_usage": True, "continuous_usage_stats": True}
    for events in (
        events_of(post.chat(stream=True, stream_options=options)),
        events_of(post.complete(stream=True, stream_options=options)),
    ):
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-4:] == [1, 2, 3, 3]
    last_only = events_of(post.chat(stream=True, stream_options={"include_usage": True}))
    assert [event["usage"] is None for event in last_only] == [True] * (len(last_only) - 1) + [False]


def test_the_stop_string_is_part_of_the_answer(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(folder.byte_tokens("one.two"), FinishReason.LENGTH)
    for fields, text in (
        ({}, "one"),
        ({"include_stop_str_in_output": True}, "one."),
        ({"no_stop_trim": True}, "one."),
    ):
        choice = post.complete(stop=["."], **fields).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def test_the_stop_token_is_part_of_the_answer(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says(folder.byte_tokens("a."))
    assert post.complete(stop_token_ids=[46]).json()["choices"][0]["text"] == "a"
    shown = post.complete(stop_token_ids=[46], include_stop_str_in_output=True)
    assert shown.json()["choices"][0]["text"] == "a."


def test_special_tokens_are_shown(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda _: says([97, folder.BOS, 98], FinishReason.LENGTH)
    assert post.complete().json()["choices"][0]["text"] == "ab"
    shown = post.complete(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert shown.json()["choices"][0]["text"] == "a<bos>b"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [104, 105]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [folder.BOS, 104]),
        ({"truncate_prompt_tokens": 100}, PROMPT),
        ({"truncate_prompt_tokens": -1, "max_tokens": 254}, [104, 105]),
        ({"truncate_prompt_tokens": -1}, PROMPT),
        ({"add_special_tokens": False}, [104, 105]),
    ],
)
def test_what_stays_of_a_prompt(post: Poster, backend: FakeBackend, fields: Any, kept: list[int]) -> None:
    assert post.complete(**fields).status_code == 200
    assert list(backend.jobs[0].tokens) == kept


def test_scores_of_a_prompt(post: Poster, backend: FakeBackend) -> None:
    backend.script = scored
    body = post.complete(prompt="ab", add_special_tokens=False, prompt_logprobs=1).json()
    assert body["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "\0"},
            "98": {"logprob": -12.25, "rank": 98, "decoded_token": "b"},
        },
    ]
    assert body["choices"][0]["logprobs"] is None
    chat = post.chat(prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in post.chat().json()


def test_scores_that_did_not_come(post: Poster) -> None:
    """The usual script of the backend gives none."""
    assert post.complete(prompt_logprobs=1).status_code == 502


def test_a_prompt_and_its_scores_are_repeated(post: Poster, backend: FakeBackend) -> None:
    backend.script = scored
    choice = post.complete(prompt="hb", add_special_tokens=False, echo=True, logprobs=0).json()["choices"][0]
    assert choice["text"] == "hba"
    assert choice["logprobs"] == {
        "tokens": ["h", "b", "a"],
        "token_logprobs": [None, -12.25, -12.125],
        "top_logprobs": [None, {"b": -12.25}, {"a": -12.125}],
        "text_offset": [0, 1, 2],
    }
    assert "prompt_logprobs" not in choice


def test_nothing_but_the_prompt(post: Poster, backend: FakeBackend) -> None:
    backend.script = scored
    body = post.complete(prompt=[104, 98], echo=True, logprobs=0, max_tokens=0).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hb", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -12.25]
    assert body["usage"]["completion_tokens"] == 0
    assert backend.jobs[0].max_tokens == 0


def test_an_echo_in_a_stream(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda job: scored(job) if job.sampling.logprobs is not None else says([97, 98])
    events = events_of(post.complete(prompt=["x", "y"], echo=True, stream=True))
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "xa", 1: "ya"}
    (first,) = events_of(post.complete(prompt="h", echo=True, stream=True, logprobs=0))
    assert first["choices"][0]["logprobs"]["tokens"] == ["<bos>", "h", "a"]


def test_tokens_by_number(post: Poster, backend: FakeBackend) -> None:
    backend.script = lambda job: with_logprobs(says([97], FinishReason.LENGTH), 1)
    choice = post.complete(logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:97"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:0": 0.0, "token_id:97": -12.125}]
    chat = post.chat(logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]
    assert chat["logprobs"]["content"][0]["token"] == "token_id:97"


def test_messages_and_the_template(post: Poster, backend: FakeBackend) -> None:
    def prompt(**fields: Any) -> str:
        backend.jobs.clear()
        response = post.chat(**fields)
        assert response.status_code == 200, response.text
        return bytes(token for token in backend.jobs[0].tokens if token < 256).decode()

    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "go"}]
    assert prompt(messages=said).endswith("<assistant>go\n<assistant>")
    assert prompt(messages=said, add_generation_prompt=False).endswith("<assistant>go\n")
    assert prompt(messages=said, continue_final_message=True).endswith("<assistant>go")
    both = post.chat(messages=said, continue_final_message=True, add_generation_prompt=True)
    assert both.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("prompt", ["é東 hé", folder.byte_tokens("é東 hé")], ids=["text", "tokens"])
def test_offsets_of_an_echo_are_places_in_its_text(post: Poster, backend: FakeBackend, prompt: Any) -> None:
    """Not in what tokens are shown as: a token amid a character is at that, and special tokens are no text."""

    backend.script = lambda job: scored(job, [0xC3, 0xA9, 98])
    body: dict[str, Any] = {"prompt": [prompt, prompt], "echo": True, "logprobs": 0}
    expected = [*([0] if isinstance(prompt, str) else []), 0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 6]
    for choice in post.complete(**body).json()["choices"]:
        assert choice["text"] == "é東 hééb"
        assert choice["logprobs"]["text_offset"] == expected
    streamed: dict[int, list[int]] = {0: [], 1: []}
    for event in events_of(post.complete(**body, stream=True)):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["logprobs"]["text_offset"]
    assert streamed == {0: expected, 1: expected}


def test_a_prompt_as_long_as_the_context_is_scored(post: Poster, backend: FakeBackend) -> None:
    backend.script = scored
    body: dict[str, Any] = {"prompt": [97] * 256, "echo": True}
    for logprobs in (1, None):
        choice = post.complete(**body, logprobs=logprobs, max_tokens=0).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("a" * 256, "length")
    cut = post.complete(**body | {"prompt": [97] * 300}, truncate_prompt_tokens=-1, max_tokens=0).json()
    assert cut["choices"][0]["text"] == "a" * 256
    assert "'prompt' has 256 tokens" in post.complete(**body, max_tokens=1).json()["error"]["message"]
