"""Grammars of forced calls: what they allow is what the parser of the same format reads, and fits the schema."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from isthmus.live.gateway.schemas.reading import SchemaError
from isthmus.live.gateway.tools import FORMATS
from isthmus.live.gateway.tools.lark import AnswerForm

from .. import folder, grammars
from .test_parsers import calls_of, content_of, parse

CITIES = ["Paris", "Łódź", 'a"b', "😀\n"]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": CITIES},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": ["city", "days"],
        "$defs": {
            "Place": {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False}
        },
    },
    "now": {},
}
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>"]


def tokenizer(special: list[str]) -> tuple[LLTokenizer, dict[str, int]]:
    """One token for each byte, and some special ones."""
    built = folder.tokenizer()
    built.add_special_tokens([AddedToken(text, special=True) for text in special])
    ids = {text: built.token_to_id(text) for text in special}
    return LLTokenizer(built.to_str(), eos_token=folder.EOS), ids


def grammar(
    name: str, schemas: Any = SCHEMAS, *, special: list[str], several: bool = False, forced: bool = True
) -> str:
    _, ids = tokenizer(special)
    return LLMatcher.grammar_from_lark(FORMATS[name].grammar(schemas, AnswerForm(several, forced, ids.get)))


def test_equal_schemas_share_a_rule() -> None:
    schema = {"properties": {"a": {"type": "null"}}}
    assert grammar("hermes", dict.fromkeys("fgh", schema), special=[]).count("%json") == 1


def follows(
    name: str,
    text: str,
    *,
    several: bool = False,
    schemas: Any = SCHEMAS,
    forced: bool = True,
    special: Sequence[str] = (),
) -> bool:
    """Whether the grammar allows `text` as a whole answer."""
    reader, ids = tokenizer(list(special))
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    tokens = [
        token for piece in pieces for token in ([ids[piece]] if piece in ids else folder.byte_tokens(piece))
    ]
    lark = grammar(name, schemas, special=list(special), several=several, forced=forced)
    return grammars.follows(reader, lark, tokens)


ALLOWED = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": @}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": @}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": @}]',
    "qwen_coder": "<tool_call>\n<function=get_weather>\n@</function>\n</tool_call>",
}


def written(name: str, arguments: dict[str, Any]) -> str:
    if name != "qwen_coder":
        return ALLOWED[name].replace("@", json.dumps(arguments, ensure_ascii=False))
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inner = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in plain.items())
    return ALLOWED[name].replace("@", "".join(inner))


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_forced_call_may_be(name: str) -> None:
    full = {"city": 'a"b', "days": 9, "exact": True, "tags": ["a"], "place": {"x": None}}
    for right in ({"city": "Łódź", "days": 2}, full, {"city": "😀\n", "days": 2}):
        assert follows(name, written(name, right))
    usual = {"city": "Paris", "days": 2}
    for wrong in ({"city": "Rome", "days": 2}, {"city": "Paris"}, usual | {"more": 1}):
        assert not follows(name, written(name, wrong))
    assert not follows(name, "Let me see. " + written(name, usual))
    assert not follows(name, written(name, usual).replace("get_weather", "other"))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_of_a_call_have_all_their_digits(name: str) -> None:
    most = 2**64 - 1
    number = {"type": "integer", "minimum": most - 1, "maximum": most, "format": "uint64"}
    properties = {
        "id": {"enum": [1234567890123456789]},
        "n": number,
        "list": {"type": "array", "items": {"$ref": "#/$defs/N"}},
        "p": {"format": "password", "type": "string"},
    }
    schemas = {"get_weather": {"properties": properties, "required": ["id"], "$defs": {"N": number}}}
    right = {"id": 1234567890123456789, "n": most, "list": [most, most - 1], "p": "x"}
    assert follows(name, written(name, right), schemas=schemas)
    for wrong in ({"id": 1234567890123456768}, right | {"n": most + 1}, right | {"list": [most - 2]}):
        assert not follows(name, written(name, wrong), schemas=schemas)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n' * 2),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'),
        ("qwen_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>\n" * 2),
        ("llama3", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'),
    ],
)
def test_several_calls_only_where_they_may_be(name: str, text: str) -> None:
    assert follows(name, text.rstrip(), several=True) == (name != "llama3")
    assert not follows(name, text.rstrip())


@pytest.mark.parametrize("special", [[], SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_where_the_model_may_choose(name: str, special: list[str]) -> None:
    """Any text, and calls that follow their schemas wherever one begins."""

    def may(text: str, *, several: bool = True) -> bool:
        if name == "mistral" and special:
            text = text.replace(
                '[TOOL_CALLS] [{"name": "get_weather", "arguments": ', "[TOOL_CALLS]get_weather[ARGS]"
            )
            text = text.replace("}]", "}")
        return follows(name, text, several=several, forced=False, special=special)

    right, wrong = (written(name, {"city": city, "days": 2}) for city in ("Paris", "Rome"))
    assert may("") and may("Just text. <tool {} é\n\n") and may(right)
    assert not may(wrong) and not may(written(name, {})) and not may(right.replace("get_weather", "other"))
    if name != "llama3":
        assert may("Let me see.\n" + right) and not may("Let me see.\n" + wrong)
        assert may(right + "\n" + right) == (name != "mistral" or bool(special))
        assert not may(right + right, several=False)


def drawn(name: str, special: list[str], seed: int, *, several: bool) -> str:
    """An answer drawn at random from what the grammar allows, token by token."""
    reader, ids = tokenizer(special)
    texts = {folder.HE: b"he"} | {token: text.encode() for text, token in ids.items()}
    source = random.Random(seed)

    def choose(allowed: list[int]) -> int:
        return folder.EOS if folder.EOS in allowed and source.random() < 0.5 else source.choice(allowed)

    matcher = grammars.matcher_of(reader, grammar(name, special=special, several=several))
    *tokens, _ = itertools.islice(grammars.written(matcher, folder.EOS, choose), 3000)
    return b"".join(texts.get(token) or bytes([token]) for token in tokens).decode()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("special", [[], SPECIAL], ids=["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_parser_reads_what_the_grammar_allows(name: str, special: list[str], several: bool) -> None:
    for seed in range(6):
        text = drawn(name, special, seed, several=several)
        events = parse(name, [text], SCHEMAS)
        assert content_of(events) == ""
        calls = calls_of(events)
        assert len(calls) >= 1 and (several or len(calls) == 1)
        for called, arguments in calls:
            if called == "get_weather":
                assert arguments["city"] in CITIES and 1 <= arguments["days"] <= 9
                assert arguments.keys() <= SCHEMAS["get_weather"]["properties"].keys()
            else:
                assert (called, arguments) == ("now", {})


def test_free_text_in_marks() -> None:
    schemas = {"write": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
    text = "<tool_call>\n<function=write>\n<parameter=text>\nif a < b:\n\n  c\n</parameter>\n</function>\n</tool_call>"
    assert follows("qwen_coder", text, schemas=schemas)
    assert calls_of(parse("qwen_coder", [text], schemas)) == (("write", {"text": "if a < b:\n\n  c"}),)
    for word in ("\x7f", "é\t"):  # signs that Lark takes only escaped
        schemas = {"write": {"properties": {"text": {"enum": [word]}}, "required": ["text"]}}
        assert follows("qwen_coder", text.replace("if a < b:\n\n  c", word), schemas=schemas)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "'pattern' of a string"),
        ({"properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}]}, "'anyOf'"),
    ],
)
def test_what_marks_cannot_follow(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(SchemaError, match=reason):
        grammar("qwen_coder", {"f": schema}, special=[])
