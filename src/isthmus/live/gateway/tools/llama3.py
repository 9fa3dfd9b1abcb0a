"""Llama 3 as JSON: `{"name": ..., "parameters": {...}}`, or several with `;` between them.

`<|python_tag|>` may stand before. Without it an object is a call only if it names a function there is, and has
arguments: an answer may well be JSON that is no call. Some text may come first, as small models have it.
"""

from __future__ import annotations

import re

from isthmus.live.gateway.schemas.grammar import FREE
from isthmus.live.gateway.tools.json_calls import JsonCallParser
from isthmus.live.gateway.tools.lark import Asked, Rules, json_calls
from isthmus.live.gateway.tools.parser import SPACE, MalformedError, Reading
from isthmus.live.gateway.tools.schemas import Schemas

TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[; \t\r\n]*")


class Llama3Parser(JsonCallParser):
    markers = (TAG,)

    def read(self) -> Reading[None]:
        mark = ""
        yield from self.span(SPACE)
        while True:
            try:
                while (yield from self.peek()) in "{[":
                    yield from self.calls(known=mark != TAG)
                    yield from self.span(_SEPARATORS)
            except MalformedError:
                self.spill()
            mark = yield from self.content_until(TAG, before="{")
            yield from self.span(SPACE)


def llama3_grammar(schemas: Schemas, asked: Asked) -> str:
    """One call of these functions: more could not be shown to the model again, its templates refuse several. Where none
    is forced, an answer that begins like one is one."""
    rules = Rules(asked, FREE) if asked.otherwise else Rules(asked)  # the other answer may be JSON, spaced so
    call = json_calls(rules, schemas, "parameters")
    if asked.forced and not asked.otherwise:
        return rules.text(call)
    tagged = f" | {rules.mark(TAG)} {call}" if asked.token_of(TAG) is not None else ""
    if asked.otherwise:
        return rules.text(call + tagged)
    other = rules.rule(r"/[^{](?s:.*)/")
    return rules.text(f"({call}{tagged} | {other})?")
