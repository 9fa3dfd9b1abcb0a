"""The bodies of the two generation endpoints, field by field."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BeforeValidator, Field

from isthmus.errors import RequestError
from isthmus.gateway import fields as f
from isthmus.gateway.fields import Refused, Strict, only, refuse
from isthmus.gateway.messages import Messages
from isthmus.gateway.refusals import refusal


class StreamOptions(Strict):
    include_usage: bool | None = f.boolean()
    # Padding against traffic analysis; not served, so only an explicit "no" is accepted.
    include_obfuscation: Annotated[Any, only(False)] = None


class GenerationRequest(Strict):
    """What both endpoints share. None means: not given."""

    model: str = Field(description="the name of a served model")
    temperature: float | None = f.number(0, 2)
    top_p: float | None = f.number(0, 1)
    top_k: int | None = f.integer(-1, 2**31 - 1)
    """0 and -1 are both off; -1 is vLLM's word."""
    min_p: float | None = f.number(0, 1)
    seed: int | None = f.seed()
    presence_penalty: float | None = f.number(-2, 2)
    frequency_penalty: float | None = f.number(-2, 2)
    repetition_penalty: float | None = f.number(0.01, 100)
    logit_bias: Annotated[Any, f.checked(f.parse_logit_bias)] = None
    max_tokens: int | None = f.integer(1, 2**31 - 1)
    n: int | None = f.integer(1, 16)
    stop: Annotated[Any, f.checked(f.parse_stops)] = None
    stop_token_ids: Annotated[Any, f.checked(f.parse_token_ids)] = None
    ignore_eos: bool | None = f.boolean()
    stream: bool | None = f.boolean()
    stream_options: StreamOptions | None = Field(default=None, description="an object")
    user: str | None = f.label()
    cache_salt: str | None = f.label()
    return_token_ids: bool | None = f.boolean()


class ChatRequest(GenerationRequest):
    messages: Messages
    max_completion_tokens: int | None = f.integer(1, 2**31 - 1)
    logprobs: bool | None = f.boolean()
    top_logprobs: int | None = f.integer(0, 20)

    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    store: Annotated[Any, only(False)] = None
    tools: Annotated[Any, only([])] = None
    functions: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    parallel_tool_calls: Annotated[Any, Refused] = None
    metadata: Annotated[Any, Refused] = None
    audio: Annotated[Any, Refused] = None
    prediction: Annotated[Any, Refused] = None
    reasoning_effort: Annotated[Any, Refused] = None
    verbosity: Annotated[Any, Refused] = None
    web_search_options: Annotated[Any, Refused] = None
    prompt_cache_key: Annotated[Any, Refused] = None
    prompt_cache_retention: Annotated[Any, Refused] = None
    safety_identifier: Annotated[Any, Refused] = None


Prompt = str | tuple[int, ...]


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or several; each is a text or a list of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return (f.parse_token_ids(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) for item in value):
            return tuple(f.parse_token_ids(item) for item in value)
    raise refuse("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


class CompletionRequest(GenerationRequest):
    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_parse_prompts)]
    logprobs: int | None = f.integer(0, 20)

    echo: Annotated[Any, only(False)] = None
    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, Refused] = None


Body = TypeVar("Body", bound=GenerationRequest)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Raises RequestError naming the field at fault."""
    try:
        request = kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise refusal(error, kind) from None
    if request.stream_options is not None and not request.stream:
        raise RequestError("'stream_options' is allowed only with stream: true", param="stream_options")
    return request
