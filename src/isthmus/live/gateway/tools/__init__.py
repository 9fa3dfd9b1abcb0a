"""Tool calling as text: how definitions, calls and results stand in a prompt, and how calls are read from an answer.

Pure: text and values in, values out.
"""

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
    """`parser`: of one answer, in which functions with these parameters may be called. `markers`: texts that calls are
    made of, which may be special tokens. `openings`: what calls begin with that follow the grammar, but for
    white space. `grammar`: Lark of
    an answer in which calls are of these functions, and follow their schemas; raises SchemaError."""

    name: str
    parser: Callable[[Schemas], CallParser]
    markers: Sequence[str]
    openings: Sequence[str]
    grammar: Callable[[Schemas, AnswerForm], str]


FORMATS = {
    each.name: each
    for each in (
        Format("hermes", HermesParser, HermesParser.markers, (OPEN,), hermes_grammar),
        Format("llama3", Llama3Parser, Llama3Parser.markers, (TAG, '{"name":"'), llama3_grammar),
        Format("qwen_coder", QwenCoderParser, QwenCoderParser.markers, (OPEN,), qwen_coder_grammar),
        Format("mistral", MistralParser, MistralParser.markers, (CALLS,), mistral_grammar),
    )
}


def recognised(template: str) -> Format | None:
    """The format that a chat template shows past calls in; None if it is none of these."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<function=" in template and "<parameter=" in template:
        return FORMATS["qwen_coder"]
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if '"parameters": ' in template and "ipython" in template:
        return FORMATS["llama3"]
    return None
