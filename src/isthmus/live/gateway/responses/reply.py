"""What `/v1/responses` writes: the answer, and the events of one that is streamed. Structures only."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.live.gateway.logprobs import TokenLogprob


class OutputText(msgspec.Struct):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []
    type: str = "output_text"


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """`call_id`: what its result is sent back with. `arguments`: JSON as the model wrote it. `namespace`: of functions
    that have one."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputCall


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """OpenAI bills these apart from others; here nothing is."""
    # As in other answers' usage, and like these only where more than the same prefix may be reused.
    exact_tokens: int | UnsetType = UNSET
    moved_tokens: int | UnsetType = UNSET
    similar_tokens: int | UnsetType = UNSET
    recomputed_tokens: int | UnsetType = UNSET


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    """Reasoning is part of the text."""


class ResponsesUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True):
    reason: str


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None
    summary: str | None = None


class ResponsesReply(msgspec.Struct):
    """Most fields repeat what was asked for."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    completed_at: int | None = None
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponsesUsage | None = None
    object: str = "response"
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False


class Event(msgspec.Struct, kw_only=True):
    """One of a streamed answer. `sequence_number`: set when it is written."""

    type: str
    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    response: ResponsesReply


class ItemEvent(Event, kw_only=True):
    output_index: int
    item: OutputItem


class PartEvent(Event, kw_only=True):
    output_index: int
    item_id: str
    part: OutputText
    content_index: int = 0


class TextDelta(Event, kw_only=True):
    output_index: int
    item_id: str
    delta: str
    logprobs: list[TokenLogprob]
    content_index: int = 0
    type: str = "response.output_text.delta"


class TextDone(Event, kw_only=True):
    output_index: int
    item_id: str
    text: str
    logprobs: list[TokenLogprob]
    content_index: int = 0
    type: str = "response.output_text.done"


class ArgumentsDelta(Event, kw_only=True):
    output_index: int
    item_id: str
    delta: str
    type: str = "response.function_call_arguments.delta"


class ArgumentsDone(Event, kw_only=True):
    output_index: int
    item_id: str
    name: str
    arguments: str
    type: str = "response.function_call_arguments.done"
