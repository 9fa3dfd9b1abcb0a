"""From a Responses body to the chat completion that it is in other words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pydantic

from isthmus.core.errors import RequestError
from isthmus.live.gateway.limits import TOO_LONG
from isthmus.live.gateway.prepare import PreparedRequest, RequestPreparer
from isthmus.live.gateway.refusals import refusal
from isthmus.live.gateway.requests import ChatRequest, GenerationRequest
from isthmus.live.gateway.responses.body import ResponsesRequest, SchemaFormat, TextOptions
from isthmus.live.gateway.responses.items import Item, later_turns, left_out, messages_of, since
from isthmus.live.gateway.terms import Terms
from isthmus.live.gateway.tool_fields import FunctionDefinition

# What chat completions call a field, and what responses do.
_NAMES = [
    (re.compile(rf"(^|'){theirs}\b"), ours)
    for theirs, ours in (
        ("messages", r"\1input"),
        ("max_completion_tokens", r"\1max_output_tokens"),
        (r"response_format(\.json_schema)?", r"\1text.format"),
        (r"tools\[(\d+)\]\.function", r"\1tools[\2]"),
    )
]


@dataclass(frozen=True)
class ResponsesPreparer:
    preparer: RequestPreparer

    def prepare(self, request: ResponsesRequest, hex_id: str, terms: Terms) -> PreparedRequest:
        """Raises RequestError."""
        try:
            return self._prepare(request, request.input, hex_id, terms)
        except RequestError as error:
            if error.code != TOO_LONG or request.truncation != "auto":
                raise renamed(error) from None
            return self._prepare_shortened(request, hex_id, terms, error)

    def _prepare(
        self, request: ResponsesRequest, items: Sequence[Item], hex_id: str, terms: Terms
    ) -> PreparedRequest:
        """Raises RequestError, in the words of a chat completion."""
        prepared = self.preparer.chat(as_chat(request, items), hex_id, terms, prefix="resp_")
        words = dict.fromkeys([*request.left_out, *left_out(request.input)])
        return replace(prepared, repeated=_repeated(request), left_out=tuple(words))

    def _prepare_shortened(
        self, request: ResponsesRequest, hex_id: str, terms: Terms, error: RequestError
    ) -> PreparedRequest:
        """Without as many turns at the beginning as must go. Raises `error` where the last one is too long."""
        # A turn is a token at least, so earlier ones need not be tried.
        turns, fitting = later_turns(request.input)[-self.preparer.card.max_length :], None
        least, most = 0, len(turns)
        while least < most:
            at = (least + most) // 2
            try:
                fitting = self._prepare(request, since(request.input, turns[at]), hex_id, terms)
                most = at
            except RequestError as found:
                if found.code != TOO_LONG:
                    raise renamed(found) from None
                least = at + 1
        if fitting is None:
            raise renamed(error) from None
        return fitting


def _repeated(request: ResponsesRequest) -> dict[str, Any]:
    text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
        "tool_choice": request.tool_choice or "auto",
        "tools": [tool.model_dump(by_alias=True, exclude_none=True) for tool in request.offered],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def as_chat(request: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """`items`: of its input. Fields of the same name are as they were read.

    Raises RequestError, in the words of a chat completion.
    """
    own = {
        "messages": messages_of(request.instructions, items),
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request.text),
        "logprobs": request.wants_logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "chat_template_kwargs": request.chat_template_kwargs,
        **_tools(request),
    }
    try:
        chat = ChatRequest.model_validate(own)
    except pydantic.ValidationError as error:
        raise refusal(error, ChatRequest) from None
    return chat.model_copy(update={name: getattr(request, name) for name in _SHARED})


_SHARED = GenerationRequest.model_fields.keys() - {"response_format"}


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    form = text.format if text else None
    if form is None:
        return None
    if not isinstance(form, SchemaFormat):
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(by_alias=True, exclude={"type"})}


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    definitions = [tool.model_dump(include=set(FunctionDefinition.model_fields)) for tool in request.tools]
    return {
        "tool_choice": request.tool_choice,
        "tools": [{"type": "function", "function": each} for each in definitions],
        "parallel_tool_calls": request.parallel_tool_calls,
    }


def renamed(error: RequestError) -> RequestError:
    """The same error in words of a Responses body."""
    message, param = _in_our_words(str(error)), error.param and _in_our_words(error.param)
    if (message, param) == (str(error), error.param):
        return error
    return RequestError(message, param=param, code=error.code)


def _in_our_words(text: str) -> str:
    for theirs, ours in _NAMES:
        text = theirs.sub(ours, text)
    return text
