"""What the two bodies accept and refuse, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isthmus.core.errors import RequestError
from isthmus.live.gateway.bodies import parse_body
from isthmus.live.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def parse(kind: type[GenerationRequest], **fields: Any) -> Any:
    usual = CHAT if kind is ChatRequest else COMPLETION
    return parse_body(kind, json.dumps(usual | fields).encode(), 100)


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
    "n": [1, 128],
    "min_tokens": [0, 5],
    "allowed_token_ids": [[0], [3, 5]],
    "bad_words": [[], ["x"]],
    "include_stop_str_in_output": [True],
    "no_stop_trim": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "prompt_logprobs": [0, 20],
    "truncate_prompt_tokens": [-1, 7],
    "truncation_side": ["left", "right"],
    "add_special_tokens": [False],
    "return_tokens_as_token_ids": [True],
    "guided_json": [{"type": "object"}, '{"type": "object"}', False],
    "guided_regex": ["a+"],
    "guided_choice": [["a", "b"]],
    "guided_grammar": ["start: /a/"],
    "regex": ["a"],
    "ebnf": ['root ::= "a"'],
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
    "model": [1],
    "min_tokens": [-1],
    "allowed_token_ids": [[], [-1], "x"],
    "bad_words": [[""], "x", [1], ["x" * 257]],
    "prompt_logprobs": [-1, 21],
    "truncate_prompt_tokens": [-2, 0, 1.5],
    "truncation_side": ["middle"],
    "guided_json": ["{", 5, []],
    "guided_choice": [[""], "a"],
    "temperature": [-0.1, 2.1, "1", True, [1]],
    "top_p": [1.1, -1],
    "top_k": [-2, 1.5, 2**31],
    "min_p": [1.1],
    "seed": [2**63, 1.5, "7"],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, -1, 101, "1"],
    "max_tokens": [-1, 1.5, "9", 2**31],
    "n": [0, 129, True],
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


# Fields of other servers: the values that are accepted, and one that is not.
BOTH_KNOW = {
    "metadata": ([{}, {"a": "b"}], 1),
    "store": ([False, True], 1),
    "service_tier": (["auto", "default", "flex", "priority", "fast"], "gold"),
    "prompt_cache_key": (["k"], 1),
    "prompt_cache_retention": (["24h"], 1),
    "safety_identifier": (["x"], 1),
    "request_id": (["x"], 1),
    "session_id": (["x"], 1),
    "rid": (["x"], 1),
    "guided_decoding_backend": (["auto"], 1),
    "stream_interval": ([1, 9], 0),
    "priority": ([0], 1),
    "use_beam_search": ([False], True),
    "length_penalty": ([1, 1.0], 0.5),
    "early_stopping": ([False], True),
    "watermarking": ([False], True),
    "cache_prompt": ([True, False], 1),
    "id_slot": ([-1, 3], "0"),
    "kv_transfer_params": ([{}], {"do_remote_decode": True}),
    "vllm_xargs": ([{}], {"a": 1}),
    "mm_processor_kwargs": ([{}], {"a": 1}),
    "logprob_token_ids": ([[]], [1]),
    "thinking_token_budget": ([], 5),
    "repetition_detection": ([], {}),
    "return_token_offsets": ([False], True),
    "return_hidden_states": ([False], True),
    "lora_path": ([], "x"),
    "custom_logit_processor": ([], "x"),
    "guided_whitespace_pattern": ([], " "),
}
CHAT_ONLY = {
    "modalities": ([["text"]], ["text", "audio"]),
    "functions": ([[]], [{}]),
    "function_call": (["none"], {"name": "f"}),
    "parallel_tool_calls": ([True, False], 1),
    "audio": ([], {}),
    "prediction": ([{"type": "content", "content": "x"}], 1),
    "reasoning_effort": (["low"], 1),
    "include_reasoning": ([True, False], 1),
    "verbosity": (["low"], 1),
    "web_search_options": ([], {}),
    "chat_template": ([], "x"),
    "documents": ([[], [{"text": "x"}]], ["x"]),
    "chat_template_kwargs": ([{}, {"enable_thinking": False}], 1),
    "add_generation_prompt": ([True, False], 1),
    "continue_final_message": ([True, False], 1),
    "echo": ([False], True),
}
COMPLETION_ONLY = {"echo": ([False, True], 1), "suffix": ([""], "x"), "prompt_embeds": ([], "x")}


@pytest.mark.parametrize(
    ("kind", "name", "accepted", "wrong"),
    [(ChatRequest, name, *values) for name, values in (BOTH_KNOW | CHAT_ONLY).items()]
    + [(CompletionRequest, name, *values) for name, values in BOTH_KNOW.items()]
    + [(CompletionRequest, name, *values) for name, values in COMPLETION_ONLY.items()],
)
def test_fields_of_other_servers(
    kind: type[GenerationRequest], name: str, accepted: list[object], wrong: object
) -> None:
    for value in [None, *accepted]:
        parse(kind, **{name: value})
    error = refused(kind, **{name: wrong})
    assert (error.param or "").startswith(name)


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


def test_stream_options() -> None:
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}
    assert parse(ChatRequest, stream=True, stream_options=options).stream_options.include_usage
    assert parse(ChatRequest, stream_options=options) is not None, "without a stream they say nothing"
    assert refused(ChatRequest, stream_options={"include_obfuscation": 1}).param is not None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}},
    ],
)
def test_response_formats(form: object) -> None:
    assert parse(ChatRequest, response_format=form).response_format.type == form["type"]


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"type": "xml"}, "response_format.type", 'must be one of "text", "json_object", "json_schema"'),
        ({}, "response_format.type", "is required"),
        ("json", "response_format", "must be an object with a type"),
        ({"type": "json_schema"}, "response_format.json_schema", "is required"),
        ({"type": "text", "strict": True}, "response_format.strict", "is not a known field"),
        (
            {"type": "json_schema", "json_schema": {"shema": {}}},
            "response_format.json_schema.shema",
            "did you mean 'schema'?",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": 5}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
    ],
)
def test_wrong_response_formats(form: object, param: str, words: str) -> None:
    error = refused(ChatRequest, response_format=form)
    assert error.param == param
    assert words in str(error)


def test_a_text_or_messages_to_tokenise() -> None:
    assert parse_body(TokenizeRequest, b'{"prompt": "x"}', 100).prompt == "x"
    assert parse_body(TokenizeRequest, b'{"messages": [{"role": "user", "content": "x"}]}', 100).messages
    for body, param in (
        (b"{}", "prompt"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content"),
        (b'{"prompt": "x", "temperature": 1}', "temperature"),
        (b"[]", None),
    ):
        with pytest.raises(RequestError) as caught:
            parse_body(TokenizeRequest, body, 100)
        assert caught.value.param == param
