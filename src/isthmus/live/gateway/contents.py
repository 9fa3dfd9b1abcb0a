"""What messages say, in the form that a chat template reads: one text, or a list of parts.

Templates of most models put texts together; those of models that also see images, and of their kin, go through parts
and show nothing of a text; some do either, or another thing for another role. Which form a template reads is found by
trying: it is rendered with a word that nobody else says, and what it reads is what it shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from isthmus.core.errors import RequestError

Message = Mapping[str, Any]
Content = str | list[dict[str, str]]
"""A text, or parts of one: `{"type": "text", "text": ...}`."""
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str]
"""Messages and tools, as a template shows them. Raises RequestError where it refuses."""

_WORDS = ("isthmusprobea", "isthmusprobeb")
_NOT, _AS_OBJECT, _AS_TEXT = range(3)
"""How a template shows a content: not at all, as the object that a part is, or as what it says."""
_OBJECT = re.compile(rf"text\\*['\"]\s*:\s*\\*['\"]{_WORDS[0]}")
_CALL = {"id": "probe0001", "type": "function", "function": {"name": "probe", "arguments": {}}}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"properties": {}}}}


class Nothing(str):
    """The content of a message that has none: null to a template that asks, and no text to one that does
    not, which would show the word None."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return "None"


NOTHING = Nothing()


def as_text(content: Content | None) -> str:
    """Parts are lines."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


def with_text(message: Message) -> Message:
    """A message that says nothing with a text that is empty; others as they are."""
    return {**message, "content": ""} if isinstance(message.get("content"), Nothing) else message


class Contents:
    """Of one template."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, str, bool], int] = {}

    def shaped(self, message: Message, *, tools: bool) -> Message:
        """The message with its content in a form that the template reads in messages of this role; as it is if it reads
        none, and parts as a text. `tools`: beside some, which templates may put into a message that they read otherwise
        without."""
        content, role = message.get("content"), message.get("role")
        if not isinstance(role, str) or content is None or isinstance(content, Nothing):
            return message
        text = as_text(content)
        forms: list[tuple[str, Content]] = [("text", text), ("part", [_part(text)])]
        if not isinstance(content, str):
            forms.insert(0, ("parts", content))
        shown = {kind: self._shown(role, kind, tools) for kind, _ in forms}
        found = max(forms, key=lambda form: shown[form[0]])[1] if any(shown.values()) else text
        return message if found is content else {**message, "content": found}

    def shows(self, role: str) -> bool:
        """What messages of this role say, in whichever form."""
        return any(
            self._shown(role, kind, tools) for kind in ("text", "part", "parts") for tools in (False, True)
        )

    def _shown(self, role: str, kind: str, tools: bool) -> int:
        """How the template shows a `kind` of content: `text`, `part` (a list of one), `parts`."""
        key = role, kind, tools
        if key not in self._known:
            content: Content = [_part(word) for word in _WORDS[: 1 if kind == "part" else 2]]
            words = _WORDS if kind == "parts" else _WORDS[:1]
            found = list[int]()
            for beside in (tools, not tools):  # some want tools, and some refuse them
                said = self._conversations(role, _WORDS[0] if kind == "text" else content, beside)
                found = found or [
                    self._shows(words, prompt)
                    for messages in said
                    if (prompt := self._prompt(messages, [_TOOL] if beside else None)) is not None
                ]
            self._known[key] = max(found, default=_NOT)
        return self._known[key]

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        """None where the template refuses."""
        try:
            return self._render(messages, tools).lower()
        except (RequestError, RecursionError):
            return None

    def _shows(self, words: Sequence[str], prompt: str) -> int:
        if not all(word in prompt for word in words):
            return _NOT
        return _AS_OBJECT if _OBJECT.search(prompt) else _AS_TEXT

    def _conversations(self, role: str, content: Content, tools: bool) -> Iterator[list[Message]]:
        """As templates want it in which roles take turns; some begin behind a system message, and some end with what a
        user says."""
        said = {"role": role, "content": content}
        if role == "user":
            yield [said]
            yield [{"role": "system", "content": "?"}, said]
            return
        asked = self.shaped({"role": "user", "content": "?"}, tools=tools)
        if role == "assistant":
            yield [asked, said, asked]
        elif role == "tool":
            called = {"role": "assistant", "content": NOTHING, "tool_calls": [_CALL]}
            answered = [asked, called, said | {"tool_call_id": _CALL["id"], "name": "probe"}]
            yield answered
            yield [*answered, asked]
        else:
            yield [said, asked]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
