"""Which bodies are taken, and how others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from ..fake import FakeBackend
from ..inprocess import Poster

PATH = "/v1/responses"

ACCEPTED = [
    {},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
    {"input": [{"role": "user", "content": "hi", "type": "message"}]},
    {"store": False, "ignore_eos": True, "max_output_tokens": 8},
    {"store": True, "background": False, "metadata": {"a": "b"}},
    {"previous_response_id": None, "conversation": None, "prompt": None, "tools": [], "tool_choice": "auto"},
    {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "none", "summary": "detailed"}},
    {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    {"text": {"format": {"type": "json_object"}}},
    {"text": {"format": {"type": "json_schema", "name": "p", "strict": True, "schema": {"type": "object"}}}},
    {"stream_options": {"include_obfuscation": False, "include_usage": True}},
    {"truncation": "auto", "service_tier": "priority", "user": "u", "safety_identifier": "s"},
    {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 1, "stop": ["x"], "min_tokens": 1},
    {
        "stop_token_ids": [1],
        "skip_special_tokens": False,
        "cache_salt": "s",
        "priority": 0,
        "logit_bias": {"5": 1},
    },
    {
        "request_id": "r",
        "session_id": "s",
        "chat_template_kwargs": {"a": 1},
        "structured_outputs": {"regex": "a"},
    },
    {"enable_response_messages": False, "include_reasoning": True, "mm_payload": "tensors", "vllm_xargs": {}},
    {"max_tool_calls": 3, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "n": 1},
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_accepted(post: Poster, fields: dict[str, Any]) -> None:
    response = post.post(PATH, **{"input": "hi"} | fields)
    assert response.status_code == 200, response.text


def content(part: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [part]}]}


REFUSED = [
    ({"input": ...}, "input"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "x", "name": "n"}]}, "input[0].name"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
    ({"input": [{"type": "web_search_cal"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "input": ""}]}, "input[0].name"),
    ({"input": [{"type": "shell_call_output", "output": 5}]}, "input[0]"),
    ({"input": ["hi", {"type": "function_call", "call_id": "c"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    (content({"type": "input_image", "image_url": "x"}), "input[0].content[0].type"),
    (content({"type": "input_file", "file_id": "x"}), "input[0].content[0].type"),
    (content({"type": "input_audio"}), "input[0].content[0].type"),
    (content({"type": "input_text", "text": 1}), "input[0].content[0].text"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "text"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"include": ["all"]}, "include[0]"),
    ({"truncation": "middle"}, "truncation"),
    ({"text": {"format": {"type": "json_schema", "name": "p"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "p", "schema": {"type": "no"}}}},
        "text.format.schema",
    ),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1000}, "max_output_tokens"),
    ({"input": "x" * 300}, "input"),
    ({"model": "other"}, "model"),
    ({"imput": "x"}, "imput"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refused_by_name(post: Poster, backend: FakeBackend, fields: dict[str, Any], param: str) -> None:
    response = post.post(PATH, **{"input": "hi"} | fields)
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert error["param"] == param
    if param != "model":
        assert repr(param) in error["message"]
    assert "messages" not in error["message"]
    assert not backend.jobs
