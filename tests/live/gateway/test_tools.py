"""Tools from the request to the answer, with a backend that writes what a model would."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from isthmus.core.errors import ConfigError
from isthmus.core.types import Job
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.settings import GatewaySettings

from . import chat_templates, folder
from .fake import FakeBackend, Script, Step, says
from .inprocess import Poster, events_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture
def backend(backend: FakeBackend) -> FakeBackend:
    """One that reads longer prompts."""
    backend.card = msgspec.structs.replace(backend.card, max_length=1_000_000)
    return backend


def poster(template: str, tmp_path: Path, backend: FakeBackend, tool_format: str = "auto") -> Poster:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    tokenizer = GatewayTokenizer.load(folder.write(tmp_path, tokenizer_config=config))
    return Poster(create_app(backend, tokenizer, GatewaySettings(tool_format=tool_format)))


def prompt_of(backend: FakeBackend) -> str:
    tokens = (
        b"he" if token == folder.HE else bytes([token]) for token in backend.jobs[-1].tokens if token <= 256
    )
    return b"".join(tokens).decode()


def streamed(post: Poster, **fields: Any) -> tuple[str, list[list[str]], str, list[dict[str, Any]]]:
    """Content, calls as (id, name, arguments), finish_reason and all deltas of a streamed answer."""
    content, calls, finish, deltas = "", [], "", []
    for event in events_of(post.chat(stream=True, **fields)):
        [choice] = event["choices"]
        deltas.append(choice["delta"])
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(calls), "function")
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"].get("arguments", "")
    return content, calls, finish, deltas


def test_the_template_gets_tools_and_arguments_as_objects(tmp_path: Path, backend: FakeBackend) -> None:
    post = poster("<tool_call>{{ messages | tojson }}{{ tools | tojson }}", tmp_path, backend)
    called = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [called]}]
    tools = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]  # type: ignore[dict-item]
    assert post.chat(messages=messages, tools=tools).status_code == 200
    calls = [{**called, "function": {"name": "now", "arguments": {"a": 1}}}]
    shown = [{"content": None, "role": "assistant", "tool_calls": calls}]
    assert prompt_of(backend) == "<tool_call>" + json.dumps(shown) + json.dumps([WEATHER])


SPOKEN = {
    "smollm2": (chat_templates.SMOLLM2, '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>'),
    "qwen2.5": (chat_templates.QWEN25, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    "llama3.1": (chat_templates.LLAMA31, '{"name": "now", "parameters": {}}'),
    "qwen3-coder": (chat_templates.QWEN_CODER, "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    "mistral": (chat_templates.MISTRAL, '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'),
    "mistral-args": (chat_templates.MISTRAL_ARGS, "[TOOL_CALLS]now[ARGS]{}"),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_the_format_is_taken_from_the_template(name: str, tmp_path: Path, backend: FakeBackend) -> None:
    template, text = SPOKEN[name]
    backend.script = lambda _: says([*folder.byte_tokens(text), folder.EOS])
    described = {**NOW, "function": {"name": "now", "description": "The time"}}
    [choice] = poster(template, tmp_path, backend).chat(tools=[described]).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("special", [None, True, False])
def test_special_tokens_that_calls_are_made_of(
    tmp_path: Path, backend: FakeBackend, special: bool | None
) -> None:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": chat_templates.MISTRAL_ARGS}
    folder.write(tmp_path, tokenizer_config=config)
    built = folder.tokenizer()
    built.add_special_tokens([AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]")])
    built.save(str(tmp_path / "tokenizer.json"))
    calls, args = (built.token_to_id(text) for text in ("[TOOL_CALLS]", "[ARGS]"))
    written = [*b"Well.", calls, *b"now", args, *b"{}", folder.EOS]
    backend.script = lambda _: says(written)
    post = Poster(create_app(backend, GatewayTokenizer.load(tmp_path)))
    fields = {} if special is None else {"skip_special_tokens": special}
    [choice] = post.chat(tools=[NOW], **fields).json()["choices"]
    assert choice["message"]["content"] == "Well."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    [plain] = post.chat(**fields).json()["choices"]
    assert plain["message"]["content"] == ("Well.[TOOL_CALLS]now[ARGS]{}" if special is False else "Well.now{}")


def test_a_format_that_is_not_known(tmp_path: Path, backend: FakeBackend) -> None:
    refused = poster("{{ tools }}", tmp_path, backend).chat(tools=[NOW])
    assert refused.status_code == 400
    assert "--tool-format" in refused.json()["error"]["message"]
    told = poster("{{ tools }}", tmp_path, backend, "mistral")
    backend.script = lambda _: says([*folder.byte_tokens("[TOOL_CALLS]now{}"), folder.EOS])
    assert told.chat(tools=[NOW]).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_format_that_the_model_cannot_be_asked_for(tmp_path: Path, backend: FakeBackend) -> None:
    with pytest.raises(ConfigError, match="tool_format: llama3 is not how this model can be asked"):
        poster(chat_templates.SMOLLM2, tmp_path, backend, "llama3")


def obeying(tokenizer: GatewayTokenizer, choose: Callable[[list[int]], int] = max) -> Script:
    """Writes what the job's grammar makes it write: the highest of the allowed tokens, or the end where it may come."""

    def script(job: Job) -> list[Step]:
        assert job.sampling.grammar
        matcher, tokens = LLMatcher(tokenizer.for_grammars, job.sampling.grammar), []
        while not tokens or tokens[-1] != folder.EOS:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(mask)]
            tokens.append(folder.EOS if folder.EOS in allowed else choose(allowed))
            assert matcher.consume_token(tokens[-1]), matcher.get_error()
        return says(tokens)

    return script


FORCED = {
    "name": "choose",
    "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
}
CHOOSE = {"type": "function", "function": FORCED}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "choose"}}], ids=["required", "named"]
)
def test_a_forced_call(
    post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer, choice: Any, stream: bool
) -> None:
    backend.script = obeying(tokenizer)
    fields: dict[str, Any] = {
        "tools": [NOW, CHOOSE] if choice != "required" else [CHOOSE],
        "tool_choice": choice,
    }
    if stream:
        content, calls, finish, _ = streamed(post, **fields)
        found = [(name, arguments) for _, name, arguments in calls]
    else:
        [answer] = post.chat(**fields).json()["choices"]
        content, finish = answer["message"]["content"] or "", answer["finish_reason"]
        calls = [call["function"] for call in answer["message"]["tool_calls"]]
        found = [(call["name"], call["arguments"]) for call in calls]
    assert (found, content, finish) == ([("choose", '{"n": 2}')], "", "tool_calls")


@pytest.mark.parametrize("name", SPOKEN)
def test_a_forced_call_in_each_format(name: str, tmp_path: Path, backend: FakeBackend) -> None:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": SPOKEN[name][0]}
    tokenizer = GatewayTokenizer.load(folder.write(tmp_path, tokenizer_config=config))
    backend.script = obeying(tokenizer)
    tool = {"type": "function", "function": FORCED | {"description": "Chooses"}}
    answered = Poster(create_app(backend, tokenizer)).chat(tools=[tool], tool_choice="required")
    [answer] = answered.json()["choices"]
    [call] = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "choose", "arguments": '{"n": 2}'}


STRICT = {"type": "function", "function": FORCED | {"strict": True}}


def test_calls_that_must_follow_their_schemas(
    post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    """Where all functions are strict."""
    post.chat(tools=[STRICT])
    grammar = backend.jobs[-1].sampling.grammar
    for text, fits in (("Just text", True), (CHOSEN, True), (CHOSEN.replace("2", "3"), False)):
        matcher = LLMatcher(tokenizer.for_grammars, grammar)
        assert matcher.consume_tokens([*folder.byte_tokens(text), folder.EOS]) == fits
    post.chat(tools=[STRICT, NOW])
    assert backend.jobs[-1].sampling.grammar == ""


DONE = {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]}
ANSWERS = {
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": DONE}},
        '{"done": true}',
    ),
    "guided_choice": (["yes", "no"], "no"),
    "guided_regex": ("[a-c]+", "abc"),
    "guided_grammar": ('start: "big " %json {"const": 18446744073709551615}', "big 18446744073709551615"),
}
WRITTEN = {name: text for name, (_, text) in SPOKEN.items()} | {
    "smollm2": SPOKEN["qwen2.5"][1],
    "mistral-args": SPOKEN["mistral"][1],  # without the special token
}
"""A call as the grammar has it."""
SAYS_LIKE_A_CALL = '{"name": "other", "child": {"name": "now", "parameters": {}}, "x": "<tool_call>"}'


@pytest.mark.parametrize("name", SPOKEN)
def test_a_model_may_call_or_answer_as_it_must(name: str, tmp_path: Path, backend: FakeBackend) -> None:
    """Tools beside each field that says how an answer must look: one grammar allows both, and nothing else."""
    call = WRITTEN[name]
    post = poster(SPOKEN[name][0], tmp_path, backend)
    tokenizer = GatewayTokenizer.load(tmp_path)
    described = {**NOW, "function": {"name": "now", "description": "The time"}}
    for field, (value, answer) in ANSWERS.items():
        for text, calls in ((call, ["now"]), (answer, [])):
            backend.script = lambda _, text=text: says([*folder.byte_tokens(text), folder.EOS])  # type: ignore[misc]
            fields = {field: value, "tools": [described]}
            [choice] = post.chat(**fields).json()["choices"]
            message = choice["message"]
            assert [each["function"]["name"] for each in message.get("tool_calls") or ()] == calls
            assert message["content"] == (None if calls else text)
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            assert follows(tokenizer, backend.jobs[-1].sampling.grammar, text)
        assert not follows(tokenizer, backend.jobs[-1].sampling.grammar, "Just text")
        post.chat(**fields, tool_choice="none")
        assert not follows(tokenizer, backend.jobs[-1].sampling.grammar, call)
        post.chat(**fields, tool_choice="required")
        assert not follows(tokenizer, backend.jobs[-1].sampling.grammar, answer)


@pytest.mark.parametrize("name", SPOKEN)
def test_an_answer_is_read_as_its_grammar_wrote_it(name: str, tmp_path: Path, backend: FakeBackend) -> None:
    """Drawn at random where one may call, or answer with JSON of much the same form."""
    post = poster(SPOKEN[name][0], tmp_path, backend)
    tokenizer = GatewayTokenizer.load(tmp_path)
    named = {"type": "object", "properties": {"name": {"enum": ["now", "then"]}, "day": {"type": "boolean"}}}
    schema = named | {"required": ["name", "day"], "additionalProperties": False}
    tool = {"type": "function", "function": FORCED | {"name": "now", "description": "d"}}
    kinds = set()
    for seed in range(12):
        backend.script = obeying(tokenizer, random.Random(seed).choice)
        [choice] = post.chat(tools=[tool], guided_json=schema).json()["choices"]
        calls = choice["message"].get("tool_calls") or []
        kinds.add(bool(calls))
        if calls:
            assert choice["message"]["content"] is None
            assert all(json.loads(call["function"]["arguments"])["n"] in (1, 2) for call in calls)
        else:
            answer = json.loads(choice["message"]["content"])
            assert answer.keys() == {"name", "day"} and answer["name"] in ("now", "then")
    assert kinds == {True, False}


def follows(tokenizer: GatewayTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer.for_grammars, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens([*folder.byte_tokens(text), folder.EOS])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize(
    "text", [SAYS_LIKE_A_CALL, f"[{SAYS_LIKE_A_CALL}]", '[{"name": "now", "parameters": {}}]']
)
def test_json_that_holds_what_looks_like_a_call_is_the_answer(
    name: str, tmp_path: Path, backend: FakeBackend, text: str, stream: bool
) -> None:
    backend.script = lambda _: says([*folder.byte_tokens(text), folder.EOS])
    post = poster(SPOKEN[name][0], tmp_path, backend)
    described = {**NOW, "function": {"name": "now", "description": "The time"}}
    answered = post.chat(tools=[described], guided_json={}, stream=stream)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events_of(answered) if event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
        assert not any("tool_calls" in delta for delta in deltas)
    else:
        [choice] = answered.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("name", SPOKEN)
def test_functions_that_no_grammar_follows_may_be_called_beside_an_answer(
    name: str, tmp_path: Path, backend: FakeBackend
) -> None:
    """Calls of functions that are not strict need not follow their schemas: these are not refused."""
    post = poster(SPOKEN[name][0], tmp_path, backend)
    tokenizer = GatewayTokenizer.load(tmp_path)
    unfollowed = {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 10**500}}}
    tool = {"type": "function", "function": {"name": "now", "description": "d", "parameters": unfollowed}}
    assert post.chat(tools=[tool], guided_choice=["yes"]).status_code == 200
    assert all(follows(tokenizer, backend.jobs[-1].sampling.grammar, text) for text in (WRITTEN[name], "yes"))
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}
    error = post.chat(tools=[strict], guided_choice=["yes"]).json()["error"]
    assert error["param"] == "tools[0].function.parameters"


def test_more_functions_than_a_grammar_holds_may_be_called_beside_an_answer(
    post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    assert post.chat(tools=many(1000), guided_choice=["yes"]).status_code == 200
    call = '<tool_call>\n{"name": "f999", "arguments": {"n": 1}}\n</tool_call>'
    assert all(follows(tokenizer, backend.jobs[-1].sampling.grammar, text) for text in (call, "yes"))


def many(count: int, *, strict: bool = False) -> list[dict[str, Any]]:
    """Functions with much to say of themselves, and little in their schemas."""
    told = {"type": "integer", "description": "x" * 300}
    functions: list[dict[str, Any]] = [
        {"name": f"f{k}", "parameters": {"properties": {f"n{k}": told}}} for k in range(count)
    ]
    return [{"type": "function", "function": each | {"strict": strict}} for each in functions]


def test_a_call_of_many_functions_is_forced_as_far_as_a_grammar_goes(
    post: Poster, backend: FakeBackend
) -> None:
    assert post.chat(tools=many(400), tool_choice="required").status_code == 200
    assert "f399" in backend.jobs[-1].sampling.grammar
    error = post.chat(tools=many(1000), tool_choice="required").json()["error"]
    assert (error["param"], "too many to force" in error["message"]) == ("tools", True)
    named = {"type": "function", "function": {"name": "f7"}}
    assert post.chat(tools=many(1000), tool_choice=named).status_code == 200
    assert "n7" in backend.jobs[-1].sampling.grammar


def test_too_many_strict_functions_are_called_without_a_grammar(post: Poster, backend: FakeBackend) -> None:
    assert post.chat(tools=many(1000, strict=True)).status_code == 200
    assert backend.jobs[-1].sampling.grammar == ""


CHOSEN = 'Well.\n<tool_call>\n{"name": "choose", "arguments": {"n": 2}}\n</tool_call>'
