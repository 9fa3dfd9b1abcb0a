"""Chat templates: what prompts they make of messages, and conversations with tools in plain messages."""

from __future__ import annotations

import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import RequestError
from isthmus.live.gateway.contents import as_text, in_words
from isthmus.live.gateway.template import ChatTemplate, load_template
from isthmus.model_files import open_files

from . import chat_templates, folder


def render(source: str, *messages: dict[str, str], **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(messages)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_an_error_of_the_template_is_the_client_s(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        render(source, {"content": "a"})
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    message, shown = {"role": "developer", "content": "a"}, "{{ messages[0].role + messages[0].content }}"
    assert render(shown, message) == "systema"
    assert render("{% set known = 'developer' %}" + shown, message) == "developera"
    # As Command R, whose own words say it.
    asked = "{% if messages[0].role == 'system' %}# developer: {{ messages[0].content }}{% endif %}"
    assert render(asked, message) == "# developer: a"


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    identity = f"{name}123456789"[:9].replace("_", "x")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


_EVERY = chat_templates.ALL | chat_templates.PARTS
SMALL = {
    "no blank lines": "{% for m in messages %}\n  {% if 1 %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation blocks": "a{% generation %}b{% endgeneration %}c",
    "JSON": "{{ messages | tojson }}{{ {'a': 1} | tojson(indent=2) }}",
    "the date": "{{ strftime_now('%Y') }}",
    "names": "{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}",
}
PARIS = _call("get_weather", city="Paris é", days=2, units={"t": ["C"]})
PLAIN = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello <there> "},
    {"role": "user", "content": "who are you?"},
]
CALLED = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [PARIS]},
    {"role": "tool", "tool_call_id": PARIS["id"], "content": "21"},
    {"role": "assistant", "content": "It is 21."},
    {"role": "user", "content": "thanks"},
]
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 May 2026", "bos_token": "<x>"},
    {"add_generation_prompt": True, "documents": [{"title": "a", "text": "b"}]},
]


@functools.cache
def _theirs(source: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=folder.tokenizer(), chat_template=source, bos_token="<bos>", eos_token="<eos>"
    )


def _ours(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<bos>", "eos_token": "<eos>"})


def _both(source: str, messages: Any, tools: Any = None, **options: Any) -> tuple[str, str]:
    """The prompts that transformers and ours render."""
    theirs = _theirs(source).apply_chat_template(
        messages, tools=tools, tokenize=False, **{"add_generation_prompt": False} | options
    )
    named = {"add_generation_prompt", "continue_final_message", "documents"}
    own = {"add_generation_prompt": False} | {name: value for name, value in options.items() if name in named}
    extra = {name: value for name, value in options.items() if name not in named}
    return theirs, _ours(source).render(messages, tools=tools, chat_template_kwargs=extra, **own)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", [*chat_templates.ALL, *SMALL])
def test_as_transformers_renders(name: str, options: dict[str, Any]) -> None:
    theirs, ours = _both((_EVERY | SMALL)[name], PLAIN, **options)
    assert ours == theirs


@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, WEATHER]], ids=["none", "one", "two"])
@pytest.mark.parametrize("name", [name for name in chat_templates.ALL if name != "smollm2"])
def test_tools_as_transformers_renders_them(name: str, tools: Any) -> None:
    theirs, ours = _both(chat_templates.ALL[name], CALLED, tools, add_generation_prompt=True)
    assert ours == theirs
    assert "Paris é" in ours and ("The weather of a city" in ours) == bool(tools)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "llama3.1", "qwen3-coder", "mistral"])
@pytest.mark.parametrize("ending", ["", " ", "\n"])
def test_a_last_message_is_continued_as_transformers_does(name: str, ending: str) -> None:
    messages = [*PLAIN, {"role": "assistant", "content": f"Hello <there> I am{ending}"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    theirs, ours = _both(chat_templates.ALL[name], messages, **options)
    assert ours == theirs
    assert ours.rstrip().endswith("I am")


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        *(
            (last, "with content to continue, and without 'tool_calls'")
            for last in ({"content": None}, {"content": []}, {"content": "so", "tool_calls": [PARIS]})
        ),
        ({"content": "hidden"}, "does not show the last message whole"),
    ],
)
@pytest.mark.parametrize("source", [chat_templates.QWEN25, chat_templates.SMOLLM2])
def test_a_message_without_content_or_with_calls_is_not_continued(
    source: str, last: dict[str, Any], reason: str
) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    hiding = "{{ messages | length }}" if "whole" in reason else source
    with pytest.raises(RequestError, match=reason) as caught:
        ChatTemplate(hiding, {}).render([*PLAIN, {"role": "assistant"} | last], **options)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("name", ["guard", "gemma3", "smollm2"])
def test_parts_are_continued_at_their_end(name: str) -> None:
    said = [PLAIN[1], {"role": "assistant", "content": _parts("So it ", "is ")}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    theirs, _ = _both(_EVERY[name], list(map(_joined if name == "smollm2" else _as_parts, said)), **options)
    assert _ours(_EVERY[name]).render(said, **options) == theirs


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message | {"content": _parts(content) if isinstance(content, str) else content}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": as_text(message["content"])}


IN_PARTS = [
    {"role": "user", "content": _parts("one ", " two")},
    {"role": "assistant", "content": _parts("a", "b")},
    {"role": "user", "content": "three"},
]
RULES = {"role": "system", "content": _parts("be", "kind")}


@pytest.mark.parametrize("name", _EVERY)
def test_a_template_is_given_the_contents_that_it_reads(name: str) -> None:
    """Parts as they are where it goes through them, as one text else; a text as one part where it reads no text."""
    source, messages = _EVERY[name], [RULES, *IN_PARTS]
    match name:
        case "guard":
            messages = IN_PARTS
            read = [_as_parts(message) for message in messages]
        case "macro":
            read = [_as_parts(message) for message in messages]
        case "gemma3":
            read = [_joined(RULES), *IN_PARTS]
        case "pixtral":
            read = [_joined(RULES), IN_PARTS[0], *map(_joined, IN_PARTS[1:])]
        case _:
            read = [_joined(message) for message in messages]
    theirs, _ = _both(source, read)
    ours = _ours(source).render(messages, add_generation_prompt=False)
    assert ours == theirs
    assert "two" in ours and "three" in ours and "type" not in ours


@pytest.mark.parametrize("name", [name for name in chat_templates.ALL if name != "smollm2"])
def test_results_of_tools_in_parts(name: str) -> None:
    called = [
        message | ({"content": _parts("2", "1")} if message["role"] == "tool" else {}) for message in CALLED
    ]
    joined = [_joined(message) if message["content"] else message for message in called]
    template = _ours(_EVERY[name])
    assert template.render(called, tools=[WEATHER]) == template.render(joined, tools=[WEATHER])
    source = "{% for m in messages if m.role == 'tool' %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
    assert (
        ChatTemplate("{{ tools is defined }}" + source, {}).render([*called[:3], CALLED[2]]) == "True(2)(1)(21)"
    )


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ("", "messages[1:]"),
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('a user must ask') }}{% endif %}", "messages"),
    ],
)
def test_templates_that_want_other_messages_around_are_given_what_they_read(before: str, shown: str) -> None:
    parts = "{% for part in m.content %}|{{ part.text }}{% endfor %}"
    source = f"{before}{{{{ tools }}}}{{% for m in {shown} %}}[{{{{ m.role }}}}{parts}]{{% endfor %}}"
    messages = [RULES, {"role": "user", "content": _parts("one", "two")}, *CALLED[1:3], *IN_PARTS[2:]]
    prompt = ChatTemplate(source, {}).render(messages)
    assert "[user|one|two]" in prompt and prompt.endswith(f"[tool|{CALLED[2]['content']}][user|three]")


def test_contents_that_a_template_reads_otherwise_beside_tools() -> None:
    """As Llama 3.2's vision models put tools into the first message of the user, which they take for a text then."""
    source = "{% for m in messages %}{% if tools %}{{ m.content | trim }}{% elif m.content is string %}{{ m.content }}"
    template = ChatTemplate(
        source + "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}", {}
    )
    asked = [{"role": "user", "content": _parts("one", "two")}]
    assert template.render(asked) == "<one><two>"
    assert template.render(asked, tools=[WEATHER]) == "one\ntwo"


def test_results_that_a_template_shows_as_objects_are_not_cut_into_letters() -> None:
    """As Command A does."""
    source = "{{ tools }}{% for m in messages if m.role == 'tool' %}{% for p in m.content %}{{ p | tojson }};"
    assert (
        ChatTemplate(source + "{% endfor %}{% endfor %}", {}).render(CALLED)
        == 'None{"type": "text", "text": "21"};'
    )


def test_arguments_are_text_to_a_template_that_refuses_objects() -> None:
    source = "{{ tools }}{% for m in messages %}{% for c in m.tool_calls %}{{ '' + c.function.arguments }}{% endfor %}"
    shown = ChatTemplate(source + "{% endfor %}", {}).render(CALLED)
    assert shown == "None" + json.dumps(PARIS["function"]["arguments"], ensure_ascii=False)


@pytest.mark.parametrize(
    "system", ["{{ raise_exception('no system role') }}", "{% continue %}"], ids=["refused", "left out"]
)
def test_tools_in_words_for_a_template_without_system_messages(system: str) -> None:
    """As Gemma 2 has none."""
    said = f"{{% if m.role == 'system' %}}{system}{{% endif %}}[{{{{ m.role }}}}]{{{{ m.content }}}}"
    shown = ChatTemplate(f"{{% for m in messages %}}{said}{{% endfor %}}", {}).render(
        CALLED[:1], tools=[WEATHER]
    )
    assert shown.startswith("[user]You can call functions") and "The weather of a city" in shown
    assert shown.endswith("</tool_call>\n\nweather?")


def test_whether_a_template_shows_what_users_say() -> None:
    shows = {name: ChatTemplate(text, {"bos_token": ""}).shows_users for name, text in _EVERY.items()}
    assert shows == dict.fromkeys(_EVERY, True)
    assert not ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}", {}).shows_users


def test_content_that_is_null_is_null_to_templates_that_ask() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """{{ tools is none }}{% for m in messages %}[{{ m.role }}]
{%- if m.content is none %}null{% elif m.content is string %}text{% elif m.content is iterable %}parts{% endif %}
{{- m.content == none }}{{ m.content != none }}{% if m.content is not none %}{{ m.content }}{% endif %}{% endfor %}
{{- messages | tojson }}{{ messages[1] | tojson }}{{ messages[1].content | tojson }}{{ messages }}"""
    # Tokenizers of transformers leave it out before they render, whatever the template asks.
    [theirs], _ = render_jinja_template([CALLED], chat_template=source)
    assert ChatTemplate(source, {}).render(CALLED) == theirs
    assert "[assistant]nullTrueFalse" in theirs


def test_content_that_is_null_is_no_text_to_templates_that_do_not_ask() -> None:
    looped = "{% for p in c %}{{ p }}{% endfor %}"
    for shown in ("{{ c }}", "{{ 'a' + c }}", "{{ c ~ 'a' }}", "{{ c | string }}", "{{ c | trim }}", looped):
        source = f"{{{{ tools }}}}{{% for m in messages %}}{{% set c = m.content %}}{shown}{{% endfor %}}"
        assert "None" not in ChatTemplate(source, {}).render(CALLED, tools=[WEATHER]), shown


@pytest.mark.parametrize("name", [*chat_templates.ALL, "gemma3"])
def test_no_prompt_says_none(name: str) -> None:
    said = CALLED if name != "gemma3" else [PLAIN[1], {"role": "assistant", "content": None}, PLAIN[3]]
    for tools in (None, [WEATHER]):
        assert "None" not in _ours(_EVERY[name]).render(said, tools=tools)


@pytest.mark.parametrize("name", ["tools", "messages", "add_generation_prompt"])
def test_template_arguments_that_are_fields_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"must not have '{name}'") as caught:
        ChatTemplate("x", {}).render(PLAIN, chat_template_kwargs={name: 1})
    assert caught.value.param == "chat_template_kwargs"


def test_tools_in_words_for_a_template_that_knows_none() -> None:
    template = ChatTemplate(chat_templates.SMOLLM2, {})
    assert template.tool_source is None and "You can call functions" not in template.render(CALLED)
    results = [*CALLED[:3], {**CALLED[2], "content": "22"}, *CALLED[3:]]
    text = template.render([PLAIN[0], *results], tools=[WEATHER])
    system, user, assistant, tool, answer, *_ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief. \n\n") and json.dumps(WEATHER) in system
    assert user == "user\nweather?<|im_end|>\n"
    written = f"<tool_call>\n{json.dumps(PARIS['function'], ensure_ascii=False)}\n</tool_call><|im_end|>\n"
    assert assistant == "assistant\n" + written
    responses = "\n".join(f"<tool_response>\n{degrees}\n</tool_response>" for degrees in (21, 22))
    assert tool == f"user\n{responses}<|im_end|>\n"
    assert answer == "assistant\nIt is 21.<|im_end|>\n"
    text = template.render([*CALLED[:1], {**CALLED[1], "content": "Let me see."}], tools=[WEATHER])
    assert text.startswith("<|im_start|>system\nYou can call functions")
    assert f"<|im_start|>assistant\nLet me see.\n{written}" in text


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """Without a default only conversations with tools are rendered, as transformers refuses others."""
    tool_use = "{{ tools | length if tools }} tools"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": tool_use}]
    template = load_template(open_files(folder.write(tmp_path, tokenizer_config={"chat_template": named})))
    assert template is not None and template.tool_source == tool_use
    assert (template.render(PLAIN), template.render(CALLED)) == ("plain", " tools")
    assert template.render(PLAIN, tools=[WEATHER]) == "1 tools"
    others = {"rag": "r", "tool_use": tool_use, "it's": ""}
    template = load_template(open_files(folder.write(tmp_path, tokenizer_config={"chat_template": others})))
    assert template is not None and template.render(PLAIN, tools=[WEATHER]) == "1 tools"
    with pytest.raises(
        RequestError, match="none of its templates is the default; there are it's, rag, tool_use"
    ):
        template.render(PLAIN)


def test_ids_that_a_template_finds_too_long_become_short_ones() -> None:
    template = ChatTemplate(chat_templates.MISTRAL, {"eos_token": "</s>"})
    long = [CALLED[0], {**CALLED[1], "tool_calls": [{**PARIS, "id": "call_12345678"}]}]
    text = template.render([*long, {**CALLED[2], "tool_call_id": "call_12345678"}])
    [of_call], [of_result] = re.findall(r'"id": "(\w{9})"', text), re.findall(r'"call_id": "(\w{9})"', text)
    assert of_call == of_result
    assert PARIS["id"] in template.render(CALLED)


def test_results_in_a_row_are_one_message() -> None:
    user, results = {"role": "user", "content": "?"}, [{"role": "tool", "content": str(k)} for k in range(3)]
    first, second, last = (f"<tool_response>\n{k}\n</tool_response>" for k in range(3))
    written = in_words([*results[:2], user, results[2]], None)
    contents = [f"{first}\n{second}", "?", last]
    assert written == [{"role": "user", "content": content} for content in contents]
    started = time.process_time()
    [message] = in_words([{"role": "tool", "content": "x" * 1_000}] * 40_000, None)
    # A tenth of a second. With the square of their number it would be minutes.
    assert time.process_time() - started < 10
    assert len(message["content"]) > 40_000_000
