from __future__ import annotations

import re

import pytest

from isthmus.errors import RequestError
from isthmus.gateway.template import ChatTemplate


def render(source: str, *messages: dict[str, str], **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(messages)


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert render(source, {"content": "a"}, {"content": "b"}) == "a\nb\n"


def test_what_a_template_finds() -> None:
    source = "{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}"
    assert render(source, bos_token="<s>") == "<s>TrueTrueTrue"


def test_loop_controls() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    assert render(source, {"content": "a"}, {"content": "b"}) == "a"


def test_generation_blocks_are_plain_text() -> None:
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_tojson_escapes_no_html() -> None:
    assert render("{{ messages | tojson }}", {"content": "<é'>"}) == """[{"content": "<é'>"}]"""
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_the_date() -> None:
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))


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
    message = {"role": "developer", "content": ""}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{% set known = 'developer' %}{{ messages[0].role }}", message) == "developer"
