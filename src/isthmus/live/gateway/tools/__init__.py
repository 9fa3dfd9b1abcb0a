"""Tool calls as text, in the formats of several model families: their parsers and grammars. Pure; knows nothing of
requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.live.gateway.tools.json_calls import (
    CALLS,
    OPEN,
    TAG,
    HermesParser,
    Llama3Parser,
    MistralParser,
    hermes_grammar,
    llama3_grammar,
    mistral_grammar,
)
from isthmus.live.gateway.tools.lark import AnswerForm, Schemas
from isthmus.live.gateway.tools.parser import CallParser
from isthmus.live.gateway.tools.qwen_coder import QwenCoderParser, qwen_coder_grammar


@dataclass(frozen=True)
class Format:
    """One way to write calls. `parser`: reads one answer, given the functions' schemas; `markers`: texts of the
    format that may be special tokens; `openings`: how a call begins, without white space; `grammar`: Lark of an
    answer whose calls follow the schemas, raises SchemaError."""

    name: str
    parser: type[CallParser]
    openings: Sequence[str]
    grammar: Callable[[Schemas, AnswerForm], str]

    @property
    def markers(self) -> Sequence[str]:
        return self.parser.markers


FORMATS = {
    each.name: each
    for each in (
        Format("hermes", HermesParser, (OPEN,), hermes_grammar),
        Format("llama3", Llama3Parser, (TAG, '{"name":"'), llama3_grammar),
        Format("qwen_coder", QwenCoderParser, (OPEN,), qwen_coder_grammar),
        Format("mistral", MistralParser, (CALLS,), mistral_grammar),
    )
}


def recognised(template: str) -> Format | None:
    """The format in which a chat template shows past calls; None if it is none of these."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<function=" in template and "<parameter=" in template:
        return FORMATS["qwen_coder"]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if '"parameters": ' in template and "ipython" in template:
        return FORMATS["llama3"]
    return None
