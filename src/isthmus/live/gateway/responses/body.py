"""The body of `/v1/responses`, field by field, in the three groups that requests.py speaks of, and the chat completion
that it is in other words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from isthmus.core.errors import RequestError
from isthmus.live.gateway import fields
from isthmus.live.gateway.fields import NULL, Checked, Refused, Strict, only, refusal, refuse
from isthmus.live.gateway.headers import RequestTerms
from isthmus.live.gateway.messages import (
    CHOICE,
    NAME,
    FunctionDefinition,
    Tools,
    functions,
    left_out,
    parse_choice,
    tools,
)
from isthmus.live.gateway.prepare import PreparedRequest, RequestPreparer
from isthmus.live.gateway.requests import MAX_LOGPROBS, TOO_LONG, ChatRequest, GenerationRequest
from isthmus.live.gateway.responses.items import (
    Input,
    Item,
    flat_name,
    items_left_out,
    later_turns,
    messages_of,
    since,
)
from isthmus.live.gateway.structured import JsonObjectFormat, NamedSchema, SchemaField, TextFormat

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    # Of items that this server's answers never have.
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


def _called(name: str) -> Checked:
    """A field that only chat completions have."""

    def check(value: Any) -> Any:
        raise refuse(f"is not a field of responses: it is called {name!r} here")

    return Checked(check, NULL)


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]
    name: str = Field(max_length=fields.MAX_LABEL_CHARS, description="a string of at most 256 characters")
    schema_: Annotated[Any, SchemaField] = Field(alias="schema")


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = Field(
        default=None, description="an object with a type"
    )
    verbosity: str | None = fields.label()


class ReasoningOptions(Strict):
    effort: str | None = fields.label()
    """For the chat template, as it is."""
    summary: Annotated[Any, only("auto", "concise", "detailed")] = None
    generate_summary: Annotated[Any, only("auto", "concise", "detailed")] = None
    """Its older name. Nothing is summarised: answers show what the model wrote."""
    context: Annotated[Any, only("auto", "current_turn", "all_turns")] = None
    mode: Annotated[Any, only("standard")] = None


class FunctionTool(FunctionDefinition):
    type: Literal["function"]
    output_schema: dict[str, Any] | None = fields.free_object()
    allowed_callers: Annotated[Any, only(["direct"])] = None
    defer_loading: Annotated[Any, only(False)] = None
    background: Annotated[Any, only(False)] = Field(default=None, alias="async")


class NamespaceTool(Strict):
    """Functions of one origin, such as an MCP server."""

    type: Literal["namespace"]
    name: str = Field(pattern=NAME, description="1 to 128 letters, digits, or any of _.:-")
    description: str | None = fields.text()
    tools: Tools[FunctionTool] = Field(fail_fast=True, description="a list of tools")

    @property
    def flat(self) -> list[FunctionTool]:
        found = functions(self.tools) or []
        return [each.model_copy(update={"name": flat_name(self.name, each.name)}) for each in found]


def _offered(tool: FunctionTool | NamespaceTool) -> FunctionTool | NamespaceTool:
    """Without what is in it that is no function."""
    return tool.model_copy(update={"tools": functions(tool.tools)}) if isinstance(tool, NamespaceTool) else tool


def _check_choice(value: Any) -> Any:
    """As it is: the answer repeats it."""
    parse_choice(value)
    return value


class ResponsesRequest(GenerationRequest):
    input: Input
    instructions: str | None = fields.text()
    max_output_tokens: int | None = fields.num_tokens(1)
    include: list[Annotated[Any, only(*INCLUDABLE)]] | None = Field(
        default=None, fail_fast=True, description="a list of strings"
    )
    top_logprobs: int | None = fields.integer(0, MAX_LOGPROBS)
    text: TextOptions | None = Field(default=None, description="an object")
    reasoning: ReasoningOptions | None = Field(default=None, description="an object")
    tools_: Tools[FunctionTool | NamespaceTool] | None = tools()
    tool_choice: Annotated[Any, Checked(_check_choice, CHOICE)] = None
    parallel_tool_calls: bool | None = fields.boolean()
    chat_template_kwargs: dict[str, Any] | None = fields.free_object()
    truncation: Annotated[Any, only("disabled", "auto")] = None
    """auto: of a conversation that is too long, turns are dropped from the beginning on."""

    # Accepted: no answer would be another without them.
    max_tool_calls: int | None = fields.integer(1, fields.MAX_INT)
    """Of tools that the server runs, of which there are none."""
    client_metadata: dict[str, Any] | None = fields.free_object()
    """Codex's word for `metadata`."""
    include_reasoning: bool | None = fields.boolean()
    mm_payload: str | None = fields.label()

    # Accepted as long as they ask for nothing.
    background: Annotated[Any, only(False)] = None
    chat_template: Annotated[Any, Refused] = None
    media_io_kwargs: Annotated[Any, only({})] = None
    enable_response_messages: Annotated[Any, only(False)] = None
    previous_input_messages: Annotated[Any, only([])] = None

    # Refused: they need what is kept of earlier requests, or what only OpenAI has.
    previous_response_id: Annotated[Any, Refused] = None
    conversation: Annotated[Any, Refused] = None
    prompt: Annotated[Any, Refused] = None
    context_management: Annotated[Any, only([])] = None
    background_options: Annotated[Any, Refused] = None
    access_programs: Annotated[Any, Refused] = None
    image: Annotated[Any, Refused] = None

    # What chat completions have and responses do not.
    max_tokens: Annotated[Any, _called("max_output_tokens")] = None
    response_format: Annotated[Any, _called("text.format")] = None
    n: Annotated[Any, only(1)] = None
    best_of: Annotated[Any, only(1)] = None
    prompt_logprobs: Annotated[Any, Refused] = None
    return_token_ids: Annotated[Any, only(False)] = None

    @property
    def tools(self) -> list[FunctionTool]:
        """All functions, by the names that the model is told."""
        return [
            each for tool in self.offered for each in (tool.flat if isinstance(tool, NamespaceTool) else [tool])
        ]

    @property
    def offered(self) -> list[FunctionTool | NamespaceTool]:
        """The tools without those that are no functions."""
        found: list[FunctionTool | NamespaceTool] = functions(self.tools_) or []
        return [_offered(tool) for tool in found]

    @property
    def left_out(self) -> list[str]:
        spaces = [tool.tools for tool in self.tools_ or () if isinstance(tool, NamespaceTool)]
        return [words for tools in (self.tools_, *spaces) for words in left_out(tools)]

    @property
    def wants_logprobs(self) -> bool:
        """The names of the likeliest tokens are of no use without the tokens', so asking for them asks for both."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


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

    def prepare(self, request: ResponsesRequest, hex_id: str, terms: RequestTerms) -> PreparedRequest:
        """Raises RequestError."""
        try:
            return self._prepare(request, request.input, hex_id, terms)
        except RequestError as error:
            if error.code != TOO_LONG or request.truncation != "auto":
                raise renamed(error) from None
            return self._prepare_shortened(request, hex_id, terms, error)

    def _prepare(
        self, request: ResponsesRequest, items: Sequence[Item], hex_id: str, terms: RequestTerms
    ) -> PreparedRequest:
        """Raises RequestError, in the words of a chat completion."""
        prepared = self.preparer.chat(as_chat(request, items), hex_id, terms, prefix="resp_")
        words = dict.fromkeys([*request.left_out, *items_left_out(request.input)])
        return replace(prepared, repeated=_repeated(request), left_out=tuple(words))

    def _prepare_shortened(
        self, request: ResponsesRequest, hex_id: str, terms: RequestTerms, error: RequestError
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
