"""Llama 3 as JSON: an answer that is `{"name": ..., "parameters": {...}}`, or several with `;` between them.

`<|python_tag|>` may stand before. Without it an object is a call only if it names a function there is, and nothing
was said before it: an answer may well be JSON that is no call.
"""

from __future__ import annotations

import re

from isthmus.gateway.tools.json_calls import JsonCallParser
from isthmus.gateway.tools.lark import Rules, TokenOf, json_calls
from isthmus.gateway.tools.parser import SPACE, MalformedError, Reading
from isthmus.gateway.tools.schemas import Schemas

TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[; \t\r\n]*")


class Llama3Parser(JsonCallParser):
    markers = (TAG,)

    def read(self) -> Reading[None]:
        tagged = False
        yield from self.span(SPACE)
        while True:
            try:
                while (yield from self.peek()) in "{[":
                    yield from self.calls(known=not tagged)
                    yield from self.span(_SEPARATORS)
            except MalformedError:
                self.spill()
            yield from self.content_until(TAG)
            tagged = True
            yield from self.span(SPACE)


def llama3_grammar(schemas: Schemas, token_of: TokenOf, *, several: bool) -> str:
    """One call of these functions: more could not be shown to the model again, its templates refuse several."""
    rules = Rules(token_of)
    return rules.text(json_calls(rules, schemas, "parameters"))
