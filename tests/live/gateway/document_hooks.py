"""What no JSON schema says, for schemathesis: fields that exclude each other, and texts that are grammars.

Bodies that the document allows are changed as little as makes them such as it means; bodies that it forbids stay.
Also for a run against a server: `SCHEMATHESIS_HOOKS=tests.live.gateway.document_hooks schemathesis run
URL/openapi.json`.
"""

from __future__ import annotations

from typing import Any

import schemathesis

SCHEMA = {"type": "object"}
TEXTS = {
    "guided_json": SCHEMA,
    "json_schema": SCHEMA,
    "json": SCHEMA,
    "schema": SCHEMA,
    "guided_regex": "a+",
    "regex": "a+",
    "guided_grammar": "start: /a+/",
    "grammar": "start: /a+/",
    "ebnf": 'root ::= "a"',
}
FORMS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "regex", "json_schema", "ebnf"),
)
FORMAT = ("name", "strict", "description", "schema")
KINDS = ("json", "json_object", "regex", "choice", "grammar")
MOST_TOKENS = 16


@schemathesis.hook
def map_case(context: schemathesis.HookContext, case: schemathesis.Case) -> schemathesis.Case:
    mode = case.meta.generation.mode if case.meta else schemathesis.GenerationMode.POSITIVE
    if mode.is_positive and isinstance(case.body, dict):
        case.body = meant(case.body)
        if (case.headers or {}).get("x-isthmus-reuse", "exact") != "exact":
            for name in ("prompt_logprobs", "echo"):  # prompts that are scored are computed whole
                case.body.pop(name, None)
    return case


def meant(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what contradicts something else in it."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in FORMS:
        if name in given and (name != next(each for each in FORMS if each in given) or "tools" in given):
            del given[name]
    if given.keys() & {*FORMS}:
        given.pop("text", None)
    given = {name: _read(name, value) for name, value in given.items()}
    if "n" in given:
        given["n"] = min(given["n"], 3)
    for name in {"max_tokens", "max_completion_tokens", "max_output_tokens"} & given.keys():
        given[name] = min(MOST_TOKENS, max(1, given[name]))
    if given.keys() >= {"max_tokens", "max_completion_tokens"}:
        given["max_tokens"] = given["max_completion_tokens"]
    for name, other in (
        ("best_of", "n"),
        ("repeat_penalty", "repetition_penalty"),
        ("prompt_logprobs", "stream"),
        ("continue_final_message", "add_generation_prompt"),
    ):
        if other in given:
            given.pop(name, None)
    if given.get("top_logprobs"):
        given["logprobs"] = True
    return _called(given)


def _called(given: dict[str, Any]) -> dict[str, Any]:
    """With functions of different names and plain parameters, of which the choice names the first."""
    tools = given.get("tools") or ()
    for at, tool in enumerate(tools):
        function = tool.get("function", tool)
        function |= {"name": f"f{at}", "parameters": SCHEMA}
    choice = given.get("tool_choice")
    if not tools and choice not in ("none", "auto"):
        given.pop("tool_choice", None)
    elif isinstance(choice, dict):
        for each in choice.get("tools", [choice]):
            each.get("function", each)["name"] = "f0"
    return given


def _read(name: str, value: Any) -> Any:
    """With texts that are grammars, wherever they stand."""
    if name == "structured_outputs":
        kinds = [kind for kind in KINDS if value.get(kind)] or ["json_object"]
        rest = {key: each for key, each in value.items() if key not in KINDS}
        return rest | {kinds[0]: _read(kinds[0], value.get(kinds[0]) or True)}
    if name == "text":
        given = value.get("format") or {"type": "text"}
        return value | {"format": {key: _read(key, each) for key, each in given.items()}}
    if name == "response_format":
        return {key: _read(key, each) if isinstance(each, dict) else each for key, each in value.items()}
    if name == "json_schema" and isinstance(value, dict) and value.keys() & {*FORMAT}:  # true is a schema, too
        return {key: TEXTS.get(key, each) for key, each in value.items()}
    return TEXTS.get(name, value)
