"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and of later models `[TOOL_CALLS]NAME[ARGS]{...}`.

Some of the latter put an id before the arguments, as `[CALL_ID]...`, or leave out `[ARGS]`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from isthmus.live.gateway.schemas.grammar import literal
from isthmus.live.gateway.tools.json_calls import JsonCallParser
from isthmus.live.gateway.tools.lark import Asked, Rules, answer, json_calls, parameters, repeated
from isthmus.live.gateway.tools.parser import SPACE, MalformedError, Reading
from isthmus.live.gateway.tools.schemas import Schemas

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[^\s\[\]{}\"]*")


class MistralParser(JsonCallParser):
    markers = (CALLS, ARGS, CALL_ID)

    def read(self) -> Reading[None]:
        while True:
            yield from self.content_until(CALLS)
            try:
                yield from self.span(SPACE)
                if (yield from self.peek()) in "[{":
                    yield from self.calls()
                else:
                    yield from self._named()
            except MalformedError:
                self.spill()

    def _named(self) -> Reading[None]:
        name = yield from self.span(_NAME)
        yield from self.span(SPACE)
        while (yield from self.peek()) == "[":
            if (yield from self.word(ARGS, CALL_ID)) == CALL_ID:
                yield from self.span(_NAME)
            yield from self.span(SPACE)
        if not name or (yield from self.peek()) != "{":
            raise MalformedError
        self.begin(name)
        yield from self.streamed(self.value())


def mistral_grammar(schemas: Schemas, asked: Asked) -> str:
    """Calls of these functions, with names before the arguments if the model has the token for it."""
    rules = Rules(asked)
    if asked.token_of(ARGS) is None:
        calls = repeated(json_calls(rules, schemas, "arguments"), ", ", several=asked.several)
        return answer(rules, CALLS, f'" [" {calls} "]"', "", replace(asked, several=False))
    named = [
        f"{literal(name)} {rules.mark(ARGS)} {rules.json(parameters(schema))}"
        for name, schema in schemas.items()
    ]
    return answer(rules, CALLS, rules.any_of(named), "", asked)
