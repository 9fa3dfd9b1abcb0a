"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Qwen 2.5 and 3 and many others write too.

What stands within may also be a list of calls, as SmolLM2 was taught.
"""

from __future__ import annotations

from isthmus.live.gateway.tools.json_calls import JsonCallParser
from isthmus.live.gateway.tools.lark import Asked, Rules, answer, json_calls
from isthmus.live.gateway.tools.parser import MalformedError, Reading
from isthmus.live.gateway.tools.schemas import Schemas

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def read(self) -> Reading[None]:
        while True:
            mark = yield from self.content_until(*self.markers)
            if mark == CLOSE:
                # The end of a call; without one it is something that the model says.
                self.drop() if self.num_calls else self.spill()
                continue
            try:
                yield from self.body(mark)
            except MalformedError:
                self.spill()

    def body(self, mark: str) -> Reading[None]:
        """What stands behind `mark`."""
        yield from self.calls()


def hermes_grammar(schemas: Schemas, asked: Asked) -> str:
    """Calls of these functions as Qwen's templates show them, each on lines of its own."""
    rules = Rules(asked)
    body = json_calls(rules, schemas, "arguments")
    return answer(rules, OPEN, f'"\\n" {body} "\\n" {rules.mark(CLOSE)}', "\n", asked)
