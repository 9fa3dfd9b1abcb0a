"""Message contents in the form that a chat template reads: one text, or a list of parts.

Templates of most models join texts; those of vision models iterate over parts and may show nothing of a text; some do
either, or differ by role. The form is found by rendering a probe word and looking for it in the prompt. Also
conversations with tools in plain messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

from isthmus.core.errors import RequestError

TemplateMessage = Mapping[str, Any]
MessageContent = str | list[dict[str, str]]
"""A text, or parts: `{"type": "text", "text": ...}`."""
Render = Callable[[Sequence[TemplateMessage], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages and tools with a template. Raises RequestError where the template refuses."""

_WORDS = ("isthmusprobea", "isthmusprobeb")
_NOT, _AS_OBJECT, _AS_TEXT = range(3)
"""A template shows a content not at all, as the part's JSON object, or as its text."""
_OBJECT = re.compile(rf"text\\*['\"]\s*:\s*\\*['\"]{_WORDS[0]}")
_CALL = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": {}}}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"properties": {}}}}


class NullContent(str):
    """The content of a message without content: null to a template that asks, and an empty text to one that does not,
    which would otherwise show the word None."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return "None"


NULL_CONTENT = NullContent()


def as_text(content: MessageContent | None) -> str:
    """A content as text; parts become lines."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


def with_text(message: TemplateMessage) -> TemplateMessage:
    """The message with an empty text for NullContent."""
    return {**message, "content": ""} if isinstance(message.get("content"), NullContent) else message


class Contents:
    """The forms of content that one template reads, by role."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, str, bool], int] = {}

    def shaped(self, message: TemplateMessage, *, tools: bool) -> TemplateMessage:
        """The message with its content in the form that the template shows best for this role; parts become a text
        where it shows none. `tools`: the conversation has tools, beside which templates may read another form."""
        content, role = message.get("content"), message.get("role")
        if not isinstance(role, str) or content is None or isinstance(content, NullContent):
            return message
        text = as_text(content)
        forms: list[tuple[str, MessageContent]] = [("text", text), ("part", [_part(text)])]
        if not isinstance(content, str):
            forms.insert(0, ("parts", content))
        shown = {kind: self._shown(role, kind, tools) for kind, _ in forms}
        found = max(forms, key=lambda form: shown[form[0]])[1] if any(shown.values()) else text
        return message if found is content else {**message, "content": found}

    def shows(self, role: str) -> bool:
        """Whether the template shows contents of this role, in any form."""
        kinds = ("text", "part", "parts")
        return any(self._shown(role, kind, tools) for kind in kinds for tools in (False, True))

    def _shown(self, role: str, kind: str, tools: bool) -> int:
        """How the template shows a `kind` of content: `text`, `part` (a list of one), `parts`."""
        key = role, kind, tools
        if key not in self._known:
            content: MessageContent = [_part(word) for word in _WORDS[: 1 if kind == "part" else 2]]
            words = _WORDS if kind == "parts" else _WORDS[:1]
            found = list[int]()
            for beside in (tools, not tools):  # some templates require tools, and some refuse them
                said = self._conversations(role, _WORDS[0] if kind == "text" else content, beside)
                found = found or [
                    self._shows(words, prompt)
                    for messages in said
                    if (prompt := self._prompt(messages, [_TOOL] if beside else None)) is not None
                ]
            self._known[key] = max(found, default=_NOT)
        return self._known[key]

    def _prompt(self, messages: Sequence[TemplateMessage], tools: Sequence[Any] | None) -> str | None:
        """None where the template refuses."""
        try:
            return self._render(messages, tools).lower()
        except (RequestError, RecursionError):
            return None

    def _shows(self, words: Sequence[str], prompt: str) -> int:
        if not all(word in prompt for word in words):
            return _NOT
        return _AS_OBJECT if _OBJECT.search(prompt) else _AS_TEXT

    def _conversations(
        self, role: str, content: MessageContent, tools: bool
    ) -> Iterator[list[TemplateMessage]]:
        """Probe conversations: templates want roles to take turns; some require a system message first, some a user's
        message last."""
        said = {"role": role, "content": content}
        if role == "user":
            yield [said]
            yield [{"role": "system", "content": "?"}, said]
            return
        asked = self.shaped({"role": "user", "content": "?"}, tools=tools)
        if role == "assistant":
            yield [asked, said, asked]
        elif role == "tool":
            called = {"role": "assistant", "content": NULL_CONTENT, "tool_calls": [_CALL]}
            answered = [asked, called, said | {"tool_call_id": _CALL["id"], "name": "probe"}]
            yield answered
            yield [*answered, asked]
        else:
            yield [said, asked]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


_INTRODUCTION = """\
You can call functions to help with what the user asks. Their signatures are within <tools></tools>:
<tools>
{definitions}
</tools>

To call a function, write a JSON object with its name and its arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def in_words(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] | None, role: str = "system"
) -> list[dict[str, Any]]:
    """The conversation with the roles system, user and assistant alone, tools and calls put in words (Hermes form).
    `tools`: definitions as clients send them; `role`: whose message introduces them, `system` or the first `user`."""
    written: list[dict[str, Any]] = []
    for are_results, some in groupby(messages, lambda message: message.get("role") == "tool"):
        if are_results:
            written.append({"role": "user", "content": "\n".join(map(_result, some))})
        else:
            written += map(_with_calls, some)
    return _introduced(written, tools, role) if tools else written


def with_short_ids(message: TemplateMessage) -> dict[str, Any]:
    """The message with call ids as Mistral's templates require them: nine letters and digits."""
    short = dict(message)
    if calls := message.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in calls]
    if identity := message.get("tool_call_id"):
        short["tool_call_id"] = _short_id(identity)
    return short


def with_written_arguments(message: TemplateMessage) -> TemplateMessage:
    """The message with the arguments of its calls as JSON text."""
    if not (calls := message.get("tool_calls")):
        return message
    written = [
        call | {"function": call["function"] | {"arguments": _json(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": written}


def _short_id(identity: str) -> str:
    fits = re.fullmatch(r"[A-Za-z0-9]{9}", identity)
    return identity if fits else blake2b(identity.encode(), digest_size=5).hexdigest()[:9]


def _introduced(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], role: str
) -> list[dict[str, Any]]:
    definitions = "\n".join(_json(tool) for tool in tools)
    introduction = _INTRODUCTION.format(definitions=definitions)
    among = messages[:1] if role == "system" else messages
    at = next((at for at, message in enumerate(among) if message.get("role") == role), None)
    if at is None:
        return [{"role": role, "content": introduction}, *messages]
    said = [as_text(messages[at].get("content")), introduction]
    content = "\n\n".join(said if role == "system" else reversed(said))
    return [*messages[:at], messages[at] | {"content": content}, *messages[at + 1 :]]


def _with_calls(message: TemplateMessage) -> dict[str, Any]:
    """An assistant's message with its calls as text."""
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    if calls:
        said = as_text(plain.get("content"))
        plain["content"] = "\n".join([said, *calls] if said else calls)
    return plain


def _call(function: Mapping[str, Any]) -> str:
    written = _json({"name": function["name"], "arguments": function["arguments"]})
    return f"<tool_call>\n{written}\n</tool_call>"


def _result(message: TemplateMessage) -> str:
    return f"<tool_response>\n{as_text(message.get('content'))}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
