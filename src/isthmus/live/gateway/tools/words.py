"""Tools for models whose chat template knows nothing of them: all in plain messages, in Hermes form.

The definitions become part of the system message, past calls the text that the model would have written, and results
a message of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

from isthmus.live.gateway.contents import as_text

Message = Mapping[str, Any]

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
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, role: str = "system"
) -> list[dict[str, Any]]:
    """The same conversation with the roles system, user and assistant alone. `tools`: definitions as clients send
    them; `role`: who says them, `system`, or the first `user`; the arguments of past calls are objects."""
    written: list[dict[str, Any]] = []
    for are_results, some in groupby(messages, lambda message: message.get("role") == "tool"):
        if are_results:
            written.append({"role": "user", "content": "\n".join(map(_result, some))})
        else:
            written += map(_with_calls, some)
    return _introduced(written, tools, role) if tools else written


def with_short_ids(message: Message) -> dict[str, Any]:
    """The message with ids of calls as Mistral's templates want them: nine letters and digits."""
    short = dict(message)
    if calls := message.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in calls]
    if identity := message.get("tool_call_id"):
        short["tool_call_id"] = _short_id(identity)
    return short


def with_written_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as text; others as they are."""
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


def _with_calls(message: Message) -> dict[str, Any]:
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


def _result(message: Message) -> str:
    return f"<tool_response>\n{as_text(message.get('content'))}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
