"""What the two bodies accept and refuse, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isthmus.errors import RequestError
from isthmus.gateway.requests import ChatRequest, CompletionRequest, GenerationRequest, parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def parse(kind: type[GenerationRequest], **fields: Any) -> Any:
    usual = CHAT if kind is ChatRequest else COMPLETION
    return parse_body(kind, json.dumps(usual | fields).encode())


def refused(kind: type[GenerationRequest], **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(kind, **fields)
    assert caught.value.http_status == 400
    assert "\n" not in str(caught.value)
    return caught.value


def pairs(values_of: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in values_of.items() for value in values]


BOTH = [ChatRequest, CompletionRequest]

GOOD = {
    "temperature": [0, 2, 0.5],
    "top_p": [0, 1],
    "top_k": [-1, 0, 50],
    "min_p": [0, 1],
    "seed": [0, -5, 2**63 - 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2.0, 2.0],
    "repetition_penalty": [0.01, 1.0, 1.3],
    "max_tokens": [1],
    "n": [1, 16],
    "stop": ["x", [], ["x"] * 16],
    "stop_token_ids": [[], [1, 2]],
    "ignore_eos": [True, False],
    "stream": [True, False],
    "user": ["someone", ""],
    "cache_salt": ["s"],
    "return_token_ids": [True],
    "logit_bias": [{}, {"5": -100, "06": 1.5}],
}

BAD = {
    "model": [1, None],
    "temperature": [-0.1, 2.1, "1", True, [1]],
    "top_p": [1.1, -1],
    "top_k": [-2, 1.5, 2**31],
    "min_p": [1.1],
    "seed": [2**63, 1.5, "7"],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, -1, 101, "1"],
    "max_tokens": [0, -1, 1.5, "9", 2**31],
    "n": [0, 17, True],
    "stop": ["", [""], ["x"] * 17, 5, [5], "x" * 5000],
    "stop_token_ids": [5, ["5"], [-1], [True]],
    "ignore_eos": [1, "true"],
    "stream": ["yes"],
    "stream_options": [True],
    "user": [5, "x" * 257],
    "cache_salt": [5],
    "return_token_ids": [1],
    "logit_bias": [[], {"x": 1}, {"-1": 1}, {"²": 1}, {"5": 101}, {"5": True}, {"5": None}, {"9" * 30: 1}],
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_accepted(kind: type[GenerationRequest], name: str, value: object) -> None:
    assert getattr(parse(kind, **{name: value}), name) is not None


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_refused(kind: type[GenerationRequest], name: str, value: object) -> None:
    error = refused(kind, **{name: value})
    assert error.param == name
    assert repr(name) in str(error)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", list(GOOD))
def test_null_means_absent(kind: type[GenerationRequest], name: str) -> None:
    assert parse(kind, **{name: None}) == parse(kind)


# OpenAI's fields that this server knows and does not serve: the values it accepts, and one it does not.
CHAT_ONLY = {
    "response_format": ([{"type": "text"}], {"type": "json_object"}),
    "modalities": ([["text"]], ["text", "audio"]),
    "store": ([False], True),
    "tools": ([[]], [{"type": "function"}]),
    "functions": ([[]], [{}]),
    "tool_choice": (["none", "auto"], "required"),
    "function_call": (["none"], {"name": "f"}),
    "service_tier": (["auto", "default"], "flex"),
    "parallel_tool_calls": ([], True),
    "metadata": ([], {}),
    "audio": ([], {}),
    "prediction": ([], {}),
    "reasoning_effort": ([], "low"),
    "verbosity": ([], "low"),
    "web_search_options": ([], {}),
    "prompt_cache_key": ([], "k"),
    "prompt_cache_retention": ([], "24h"),
    "safety_identifier": ([], "x"),
}
COMPLETION_ONLY = {"echo": ([False], True), "best_of": ([1], 2), "suffix": ([], "x")}


@pytest.mark.parametrize(
    ("kind", "name", "accepted", "wrong"),
    [(ChatRequest, name, *values) for name, values in CHAT_ONLY.items()]
    + [(CompletionRequest, name, *values) for name, values in COMPLETION_ONLY.items()],
)
def test_unserved_fields(
    kind: type[GenerationRequest], name: str, accepted: list[object], wrong: object
) -> None:
    for value in [None, *accepted]:
        parse(kind, **{name: value})
    error = refused(kind, **{name: wrong})
    assert error.param == name
    assert "supported" in str(error)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([], ((),)),
    ],
)
def test_prompts(prompt: object, parsed: object) -> None:
    assert parse(CompletionRequest, prompt=prompt).prompt == parsed


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, [1, "a"], [[1], "a"], [[1, -1]], [1.5], [True], [["a"]], [None]]
)
def test_wrong_prompts(prompt: object) -> None:
    assert refused(CompletionRequest, prompt=prompt).param == "prompt"


def test_logprobs_of_chat() -> None:
    assert parse(ChatRequest, logprobs=True, top_logprobs=20).top_logprobs == 20
    assert refused(ChatRequest, logprobs=5).param == "logprobs"
    assert refused(ChatRequest, logprobs=True, top_logprobs=21).param == "top_logprobs"


def test_logprobs_of_completions() -> None:
    assert parse(CompletionRequest, logprobs=20).logprobs == 20
    assert refused(CompletionRequest, logprobs=True).param == "logprobs"
    assert refused(CompletionRequest, logprobs=21).param == "logprobs"


def test_stream_options_need_a_stream() -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    assert parse(ChatRequest, stream=True, stream_options=options).stream_options.include_usage
    error = refused(ChatRequest, stream_options=options)
    assert error.param == "stream_options"
    assert "only with stream: true" in str(error)
