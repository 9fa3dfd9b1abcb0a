"""Tools from the request to the answer, with a backend that writes what a model would."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from isthmus.core.errors import ConfigError
from isthmus.core.types import Job
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.settings import GatewaySettings

from . import chat_templates, folder
from .exchanges import prompt_of
from .fake import FakeBackend, Script, Step, says
from .grammars import follows, matcher_of, written
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
DESCRIBED = {"type": "function", "function": {"name": "now", "description": "The time"}}


@pytest.fixture
def backend(backend: FakeBackend) -> FakeBackend:
    """One that reads longer prompts."""
    backend.card = msgspec.structs.replace(backend.card, max_length=1_000_000)
    return backend


def loaded(template: str, tmp_path: Path) -> GatewayTokenizer:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    return GatewayTokenizer.load(folder.write(tmp_path, tokenizer_config=config))


def poster(template: str, tmp_path: Path, backend: FakeBackend, tool_format: str = "auto") -> Poster:
    return Poster(create_app(backend, loaded(template, tmp_path), GatewaySettings(tool_format=tool_format)))


def writes(text: str) -> Script:
    return lambda _: says([*folder.byte_tokens(text), folder.EOS])


def last_grammar(backend: FakeBackend) -> str:
    return backend.jobs[-1].sampling.grammar


def streamed(post: Poster, **fields: Any) -> tuple[str, list[list[str]], str]:
    """Content, calls as (name, arguments) and finish_reason of a streamed answer."""
    content, calls, finish = "", [], ""
    for event in events_of(post.chat(stream=True, **fields)):
        [choice] = event["choices"]
        content += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(calls), "function")
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments", "")
    return content, calls, finish


def test_the_template_gets_tools_and_arguments_as_objects(tmp_path: Path, backend: FakeBackend) -> None:
    post = poster("<tool_call>{{ messages | tojson }}{{ tools | tojson }}", tmp_path, backend)
    called = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [called]}]
    tools = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]  # type: ignore[dict-item]
    assert post.chat(messages=messages, tools=tools).status_code == 200
    calls = [{**called, "function": {"name": "now", "arguments": {"a": 1}}}]
    shown = [{"content": None, "role": "assistant", "tool_calls": calls}]
    assert prompt_of(backend.jobs[-1]) == "<tool_call>" + json.dumps(shown) + json.dumps([WEATHER])


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
    backend.script = writes(text)
    [choice] = poster(template, tmp_path, backend).chat(tools=[DESCRIBED]).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("special", [None, True, False])
def test_special_tokens_that_calls_are_made_of(
    tmp_path: Path, backend: FakeBackend, special: bool | None
) -> None:
    loaded(chat_templates.MISTRAL_ARGS, tmp_path)
    built = folder.tokenizer()
    built.add_special_tokens([AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]")])
    built.save(str(tmp_path / "tokenizer.json"))
    calls, args = (built.token_to_id(text) for text in ("[TOOL_CALLS]", "[ARGS]"))
    backend.script = lambda _: says([*b"Well.", calls, *b"now", args, *b"{}", folder.EOS])
    post = Poster(create_app(backend, GatewayTokenizer.load(tmp_path)))
    fields = {} if special is None else {"skip_special_tokens": special}
    [choice] = post.chat(tools=[NOW], **fields).json()["choices"]
    assert choice["message"]["content"] == "Well."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    [plain] = post.chat(**fields).json()["choices"]
    assert plain["message"]["content"] == ("Well.[TOOL_CALLS]now[ARGS]{}" if special is False else "Well.now{}")


def test_formats_that_are_not_known_or_do_not_fit_the_model(tmp_path: Path, backend: FakeBackend) -> None:
    refused = poster("{{ tools }}", tmp_path, backend).chat(tools=[NOW])
    assert refused.status_code == 400 and "--tool-format" in refused.json()["error"]["message"]
    told = poster("{{ tools }}", tmp_path, backend, "mistral")
    backend.script = writes("[TOOL_CALLS]now{}")
    assert told.chat(tools=[NOW]).json()["choices"][0]["finish_reason"] == "tool_calls"
    with pytest.raises(ConfigError, match="tool_format: llama3 is not how this model can be asked"):
        poster(chat_templates.SMOLLM2, tmp_path, backend, "llama3")


def obeying(tokenizer: GatewayTokenizer, choose: Callable[[list[int]], int] = max) -> Script:
    """Writes what the job's grammar makes it write: the highest of the allowed tokens, or the end where it may come."""

    def chosen(allowed: list[int]) -> int:
        return folder.EOS if folder.EOS in allowed else choose(allowed)

    def script(job: Job) -> list[Step]:
        assert job.sampling.grammar
        return says(list(written(matcher_of(tokenizer.for_grammars, job.sampling.grammar), folder.EOS, chosen)))

    return script


FORCED = {
    "name": "choose",
    "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
}
CHOOSE = {"type": "function", "function": FORCED}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_forced_call(
    post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer, named: bool, stream: bool
) -> None:
    backend.script = obeying(tokenizer)
    fields: dict[str, Any] = {"tools": [CHOOSE], "tool_choice": "required"}
    if named:
        fields = {"tools": [NOW, CHOOSE], "tool_choice": {"type": "function", "function": {"name": "choose"}}}
    if stream:
        content, calls, finish = streamed(post, **fields)
    else:
        [answer] = post.chat(**fields).json()["choices"]
        content, finish = answer["message"]["content"] or "", answer["finish_reason"]
        called = [call["function"] for call in answer["message"]["tool_calls"]]
        calls = [[call["name"], call["arguments"]] for call in called]
    assert (calls, content, finish) == ([["choose", '{"n": 2}']], "", "tool_calls")


@pytest.mark.parametrize("name", SPOKEN)
def test_a_forced_call_in_each_format(name: str, tmp_path: Path, backend: FakeBackend) -> None:
    post = poster(SPOKEN[name][0], tmp_path, backend)
    backend.script = obeying(GatewayTokenizer.load(tmp_path))
    tool = {"type": "function", "function": FORCED | {"description": "Chooses"}}
    [answer] = post.chat(tools=[tool], tool_choice="required").json()["choices"]
    [call] = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "choose", "arguments": '{"n": 2}'}


def test_calls_follow_their_schemas_where_all_functions_are_strict(
    post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    strict = {"type": "function", "function": FORCED | {"strict": True}}
    chosen = 'Well.\n<tool_call>\n{"name": "choose", "arguments": {"n": 2}}\n</tool_call>'
    post.chat(tools=[strict])
    for text, fits in (("Just text", True), (chosen, True), (chosen.replace("2", "3"), False)):
        assert follows(tokenizer.for_grammars, last_grammar(backend), folder.byte_tokens(text)) == fits
    post.chat(tools=[strict, NOW])
    assert last_grammar(backend) == ""
    post.chat(tools=many(1000, strict=True))
    assert last_grammar(backend) == "", "too many to follow"


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
    grammars = GatewayTokenizer.load(tmp_path).for_grammars
    for field, (value, answer) in ANSWERS.items():
        fields = {field: value, "tools": [DESCRIBED]}
        for text, calls in ((call, ["now"]), (answer, [])):
            backend.script = writes(text)
            [choice] = post.chat(**fields).json()["choices"]
            message = choice["message"]
            assert [each["function"]["name"] for each in message.get("tool_calls") or ()] == calls
            assert message["content"] == (None if calls else text)
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            assert follows(grammars, last_grammar(backend), text)
        assert not follows(grammars, last_grammar(backend), "Just text")
        post.chat(**fields, tool_choice="none")
        assert not follows(grammars, last_grammar(backend), call)
        post.chat(**fields, tool_choice="required")
        assert not follows(grammars, last_grammar(backend), answer)


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


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize(
    "text", [SAYS_LIKE_A_CALL, f"[{SAYS_LIKE_A_CALL}]", '[{"name": "now", "parameters": {}}]']
)
def test_json_that_holds_what_looks_like_a_call_is_the_answer(
    name: str, tmp_path: Path, backend: FakeBackend, text: str
) -> None:
    backend.script = writes(text)
    post = poster(SPOKEN[name][0], tmp_path, backend)
    assert streamed(post, tools=[DESCRIBED], guided_json={}) == (text, [], "stop")
    [choice] = post.chat(tools=[DESCRIBED], guided_json={}).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("name", SPOKEN)
def test_functions_that_no_grammar_follows_may_be_called_beside_an_answer(
    name: str, tmp_path: Path, backend: FakeBackend
) -> None:
    """Calls of functions that are not strict need not follow their schemas: these are not refused."""
    post = poster(SPOKEN[name][0], tmp_path, backend)
    grammars = GatewayTokenizer.load(tmp_path).for_grammars
    unfollowed = {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 10**500}}}
    function = {"name": "now", "description": "d", "parameters": unfollowed}
    loose, strict = ({"type": "function", "function": function | more} for more in ({}, {"strict": True}))
    assert post.chat(tools=[loose], guided_choice=["yes"]).status_code == 200
    assert all(follows(grammars, last_grammar(backend), text) for text in (WRITTEN[name], "yes"))
    error = post.chat(tools=[strict], guided_choice=["yes"]).json()["error"]
    assert error["param"] == "tools[0].function.parameters"


def many(count: int, *, strict: bool = False) -> list[dict[str, Any]]:
    """Functions with long descriptions and short schemas."""
    told = {"type": "integer", "description": "x" * 300}
    functions = [{"name": f"f{k}", "parameters": {"properties": {f"n{k}": told}}} for k in range(count)]
    return [{"type": "function", "function": each | {"strict": strict}} for each in functions]


def test_calls_of_many_functions_are_forced_as_far_as_a_grammar_goes(
    post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer
) -> None:
    assert post.chat(tools=many(400), tool_choice="required").status_code == 200
    assert "f399" in last_grammar(backend)
    error = post.chat(tools=many(1000), tool_choice="required").json()["error"]
    assert (error["param"], "too many to force" in error["message"]) == ("tools", True)
    named = {"type": "function", "function": {"name": "f7"}}
    assert post.chat(tools=many(1000), tool_choice=named).status_code == 200
    assert "n7" in last_grammar(backend)
    assert post.chat(tools=many(1000), guided_choice=["yes"]).status_code == 200
    call = '<tool_call>\n{"name": "f999", "arguments": {"n": 1}}\n</tool_call>'
    assert all(follows(tokenizer.for_grammars, last_grammar(backend), text) for text in (call, "yes"))
