"""The formats there are, and which of them a model speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.gateway.tools.hermes import HermesParser
from isthmus.gateway.tools.llama3 import Llama3Parser
from isthmus.gateway.tools.mistral import MistralParser
from isthmus.gateway.tools.parser import CallParser
from isthmus.gateway.tools.qwen_coder import QwenCoderParser

Schemas = Mapping[str, Mapping[str, Any]]
"""Of the parameters of each function, by its name."""


@dataclass(frozen=True)
class Format:
    """`parser`: of one answer, in which functions with these parameters may be called. `markers`: texts that calls are
    made of, which may be special tokens."""

    name: str
    parser: Callable[[Schemas], CallParser]
    markers: Sequence[str]


FORMATS = {
    each.name: each
    for each in (
        Format("hermes", HermesParser, HermesParser.markers),
        Format("llama3", Llama3Parser, Llama3Parser.markers),
        Format("qwen_coder", QwenCoderParser, QwenCoderParser.markers),
        Format("mistral", MistralParser, MistralParser.markers),
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
