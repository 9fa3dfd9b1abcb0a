"""Llama 3 as JSON: an answer that is `{"name": ..., "parameters": {...}}`, or several with `;` between them.

`<|python_tag|>` may stand before. Without it an object is a call only if it names a function there is, and nothing
was said before it: an answer may well be JSON that is no call.
"""

from __future__ import annotations

import re

from isthmus.gateway.tools.json_calls import JsonCallParser
from isthmus.gateway.tools.parser import SPACE, MalformedError, Reading

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
