"""Tool calls as text, in the formats of several model families: their parsers and grammars. Pure; knows nothing of
requests."""

from __future__ import annotations

from isthmus.live.gateway.tools.json_calls import HermesParser, Llama3Parser, MistralParser
from isthmus.live.gateway.tools.parser import CallParser
from isthmus.live.gateway.tools.qwen_coder import QwenCoderParser

Format = type[CallParser]
FORMATS: dict[str, Format] = {
    each.name: each for each in (HermesParser, Llama3Parser, QwenCoderParser, MistralParser)
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
