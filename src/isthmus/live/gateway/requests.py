"""The bodies of the endpoints, field by field.

A field of OpenAI's, vLLM's or SGLang's servers is in one of three groups: it does something; it is accepted, since
no answer of this server would be another without it; or it is refused by name, since to ignore it would change one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from isthmus.live.gateway import fields as f
from isthmus.live.gateway import structured
from isthmus.live.gateway.fields import (
    Checked,
    LogitBias,
    Refused,
    SomeTokenIds,
    Stops,
    Strict,
    TokenIds,
    only,
    refuse,
)
from isthmus.live.gateway.messages import AllowedFunctions, Messages, Tool, ToolChoice, Tools, functions, tools
from isthmus.live.gateway.structured import ResponseFormat, SchemaField, StructuredOutputs

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_BAD_WORDS = 256


def _parse_truncation(value: Any) -> int:
    if type(value) is not int or value < -1 or value == 0:
        raise refuse("must be -1 or an integer of at least 1")
    return value


Truncation = Checked(_parse_truncation, {"type": "integer", "minimum": -1, "not": {"const": 0}})
BestOf = Checked(f.parse_count, {"enum": [1]})


class StreamOptions(Strict):
    include_usage: bool | None = f.boolean()
    continuous_usage_stats: bool | None = f.boolean()
    """Usage so far in every event."""
    include_obfuscation: bool | None = f.boolean()
    """Padding against traffic analysis: no answer would be another, and none is made."""


class GenerationRequest(Strict):
    """What all generating endpoints share. None means: not given."""

    model: str | None = f.model_name()
    temperature: float | None = f.number(0, 2)
    top_p: float | None = f.number(0, 1)
    top_k: int | None = f.integer(-1, f.MAX_INT)
    """0 and -1 are both off; -1 is vLLM's word."""
    min_p: float | None = f.number(0, 1)
    seed: int | None = f.seed()
    presence_penalty: float | None = f.number(-2, 2)
    frequency_penalty: float | None = f.number(-2, 2)
    repetition_penalty: float | None = f.number(0.01, 100)
    repeat_penalty: float | None = f.number(0.01, 100)
    """llama.cpp's and Ollama's word for `repetition_penalty`."""
    logit_bias: Annotated[Any, LogitBias] = None
    allowed_token_ids: Annotated[Any, SomeTokenIds] = None
    bad_words: Annotated[Any, f.texts(0, MAX_BAD_WORDS, f.MAX_LABEL_CHARS)] = None
    max_tokens: int | None = f.num_tokens(1)
    min_tokens: int | None = f.integer(0, f.MAX_INT)
    n: int | None = f.integer(1, MAX_CHOICES)
    stop: Annotated[Any, Stops] = None
    stop_token_ids: Annotated[Any, TokenIds] = None
    include_stop_str_in_output: bool | None = f.boolean()
    no_stop_trim: bool | None = f.boolean()
    """SGLang's word for `include_stop_str_in_output`."""
    ignore_eos: bool | None = f.boolean()
    skip_special_tokens: bool | None = f.boolean()
    spaces_between_special_tokens: bool | None = f.boolean()
    """The tokenizers served here put no spaces there of their own, so both values say the same."""
    stream: bool | None = f.boolean()
    stream_options: StreamOptions | None = Field(default=None, description="an object")
    prompt_logprobs: int | None = f.integer(0, MAX_LOGPROBS)
    truncate_prompt_tokens: Annotated[Any, Truncation] = None
    """So many tokens of the prompt stay; -1: as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = Field(default=None, description='"left" or "right"')
    add_special_tokens: bool | None = f.boolean()
    return_token_ids: bool | None = f.boolean()
    return_tokens_as_token_ids: bool | None = f.boolean()
    """Log-probabilities name tokens as `token_id:17`."""
    cache_salt: str | None = f.label()

    response_format: ResponseFormat | None = Field(default=None, description="an object with a type")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="an object")
    guided_json: Annotated[Any, SchemaField] = None
    guided_regex: str | None = f.regex()
    guided_choice: Annotated[Any, f.texts(1, structured.MAX_CHOICES, f.MAX_STOP_CHARS)] = None
    guided_grammar: str | None = f.text()
    regex: str | None = f.regex()
    """SGLang's word for `guided_regex`."""
    json_schema: Annotated[Any, SchemaField] = None
    ebnf: str | None = f.text()
    """SGLang's words for `guided_json` and `guided_grammar`."""

    # Accepted: no answer would be another without them.
    user: str | None = f.label()
    metadata: dict[str, Any] | None = f.free_object()
    store: bool | None = f.boolean()
    service_tier: Annotated[Any, only("auto", "default", "flex", "scale", "priority", "fast")] = None
    safety_identifier: str | None = f.label()
    prompt_cache_key: str | None = f.label()
    prompt_cache_retention: str | None = f.label()
    prompt_cache_options: dict[str, Any] | None = f.free_object()
    request_id: str | None = f.label()
    rid: str | None = f.label()
    session_id: str | None = f.label()
    guided_decoding_backend: str | None = f.label()
    cache_prompt: bool | None = f.boolean()
    id_slot: int | None = f.integer(-1, f.MAX_INT)
    """llama.cpp's: prompts are cached here whatever a request says, wherever that is."""
    stream_interval: int | None = f.integer(1, f.MAX_INT)

    # Accepted as long as they ask for nothing.
    priority: Annotated[Any, only(0)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    best_of: Annotated[Any, BestOf] = None
    """Only as many as `n`: answers are not ranked."""
    length_penalty: Annotated[Any, only(1)] = None
    early_stopping: Annotated[Any, only(False)] = None
    watermarking: Annotated[Any, only(False)] = None
    guided_whitespace_pattern: Annotated[Any, Refused] = None
    kv_transfer_params: Annotated[Any, only({})] = None
    ec_transfer_params: Annotated[Any, only({})] = None
    vllm_xargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    logprob_token_ids: Annotated[Any, only([])] = None
    thinking_token_budget: Annotated[Any, Refused] = None
    repetition_detection: Annotated[Any, Refused] = None
    return_token_offsets: Annotated[Any, only(False)] = None
    return_hidden_states: Annotated[Any, only(False)] = None
    return_routed_experts: Annotated[Any, only(False)] = None
    lora_path: Annotated[Any, Refused] = None
    stop_regex: Annotated[Any, Refused] = None
    custom_logit_processor: Annotated[Any, Refused] = None
    custom_params: Annotated[Any, Refused] = None
    logits_processors: Annotated[Any, only([])] = None
    moderation: Annotated[Any, Refused] = None
    session_params: Annotated[Any, Refused] = None
    extra_key: Annotated[Any, Refused] = None


class TemplateFields(Strict):
    """How messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = f.boolean()
    continue_final_message: bool | None = f.boolean()
    chat_template_kwargs: dict[str, Any] | None = f.free_object()
    documents: list[dict[str, Any]] | None = Field(default=None, description="a list of objects")
    tools_: Tools[Tool] | None = tools()
    chat_template: Annotated[Any, Refused] = None
    media_io_kwargs: Annotated[Any, only({})] = None

    @property
    def tools(self) -> list[Tool] | None:
        """Those that the model is told of."""
        return functions(self.tools_)


class ChatRequest(GenerationRequest, TemplateFields):
    max_completion_tokens: int | None = f.num_tokens(1)
    logprobs: bool | None = f.boolean()
    top_logprobs: int | None = f.integer(0, MAX_LOGPROBS)
    tool_choice: Annotated[Any, ToolChoice] = None
    parallel_tool_calls: bool | None = f.boolean()
    reasoning_effort: str | None = f.label()
    """For the chat template, as it is."""

    verbosity: str | None = f.label()
    prediction: dict[str, Any] | None = f.free_object()
    include_reasoning: bool | None = f.boolean()
    separate_reasoning: bool | None = f.boolean()
    stream_reasoning: bool | None = f.boolean()

    modalities: Annotated[Any, only(["text"])] = None
    echo: Annotated[Any, only(False)] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    audio: Annotated[Any, Refused] = None
    web_search_options: Annotated[Any, Refused] = None

    @property
    def tools(self) -> list[Tool] | None:
        found, choice = super().tools, self.tool_choice
        if found is None or not isinstance(choice, AllowedFunctions):
            return found
        return [tool for tool in found if tool.function.name in choice.names]


Prompt = str | tuple[int, ...]


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt or several; each is a text or a list of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        if all(isinstance(item, int | float) for item in value):
            return (f.parse_token_ids(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) for item in value):
            return tuple(f.parse_token_ids(item) for item in value)
    raise refuse("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": f.TOKEN, "minItems": 1}
_TEXTS, _LISTS = ({"type": "array", "items": items, "minItems": 1} for items in (_TEXT, _TOKENS))
Prompts = Checked(_parse_prompts, {"anyOf": [_TEXT, _TOKENS, _TEXTS, _LISTS]}, nullable=False)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, Prompts]
    max_tokens: int | None = f.num_tokens(0)
    """0 with `echo`: nothing but the prompt."""
    logprobs: int | None = f.integer(0, MAX_LOGPROBS)
    echo: bool | None = f.boolean()
    suffix: Annotated[Any, only("")] = None
    prompt_embeds: Annotated[Any, Refused] = None


class TokenizeFields(Strict):
    model: str | None = f.model_name()
    add_special_tokens: bool | None = f.boolean()
    return_token_strs: bool | None = f.boolean()


class TokenizeText(TokenizeFields):
    prompt: str = Field(description="a string")


class TokenizeChat(TokenizeFields, TemplateFields):
    mm_processor_kwargs: Annotated[Any, only({})] = None


def _text_or_chat(value: Any) -> str:
    return "messages" if isinstance(value, dict) and "messages" in value else "prompt"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("prompt")] | Annotated[TokenizeChat, Tag("messages")],
    Discriminator(_text_or_chat),
]


class DetokenizeRequest(Strict):
    model: str | None = f.model_name()
    tokens: Annotated[Any, Checked(f.parse_token_ids, TokenIds.schema, nullable=False)]
