"""From a request's fields to what a cluster is given: lengths of prompt and answer, and `Sampling`."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag

from isthmus.core.errors import RequestError
from isthmus.core.types import ModelCard, Sampling
from isthmus.live.gateway import fields, structured
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
from isthmus.live.gateway.tokenizer import GenerationDefaults

TOO_LONG = "context_length_exceeded"


def check_prompt(num_tokens: int, card: ModelCard, param: str, answer: int = 1) -> None:
    """Raises RequestError when a prompt is empty or leaves no room for `answer` tokens."""
    if num_tokens == 0:
        raise RequestError(f"{param!r} is empty: give at least one token", param=param)
    if num_tokens + answer > card.max_length:
        message = (
            f"This model's maximum context length is {card.max_length} tokens, prompt and answer together; "
            f"{param!r} has {num_tokens} tokens. Please shorten it"
        )
        raise RequestError(message, param=param, code=TOO_LONG)


def check_chars(num_chars: int, least_tokens: int, card: ModelCard, param: str) -> None:
    """Raises RequestError for a text that cannot have fewer tokens than are too many, before they are counted."""
    if least_tokens > card.max_length:
        message = (
            f"This model's maximum context length is {card.max_length} tokens, prompt and answer together; "
            f"{param!r} has {num_chars} characters, which are at least {least_tokens} tokens. Please shorten it"
        )
        raise RequestError(message, param=param, code=TOO_LONG)


def truncated(
    tokens: tuple[int, ...], request: GenerationRequest, asked: int | None, card: ModelCard
) -> tuple[int, ...]:
    """What `truncate_prompt_tokens` leaves of a prompt: its end, or its beginning if `truncation_side` is right.

    -1 keeps what leaves room for the `asked` tokens of the answer, for one where it is None, and never nothing.
    """
    most = request.truncate_prompt_tokens
    if most is None:
        return tokens
    if most < 0:
        most = max(1, card.max_length - (1 if asked is None else asked))
    return tokens[:most] if request.truncation_side == "right" else tokens[-most:]


def answer_tokens(
    num_prompt_tokens: int, asked: int | None, card: ModelCard, *, param: str, default: int | None
) -> int:
    """Most tokens the answer may have. `asked`: by the client, in the field `param`.

    `default` None: the rest of the context; but who does not ask for it gets no memory of other nodes for an answer,
    which is a quarter of a node's at least. Raises RequestError when `asked` does not fit behind the prompt.
    """
    rest = card.max_length - num_prompt_tokens
    if asked is None:
        here = max(card.node_length - num_prompt_tokens, card.node_length // 4)
        most = min(rest, here) if card.node_length else rest
        return most if default is None else min(default, rest)
    if asked > rest:
        message = (
            f"This model's maximum context length is {card.max_length} tokens; the prompt has "
            f"{num_prompt_tokens} and {param!r} asks for {asked} more. Ask for at most {rest}"
        )
        raise RequestError(message, param=param, code=TOO_LONG)
    return asked


SEED_MASK = 2**63 - 1


def samplings(base: Sampling, seed: int | None, n: int) -> list[Sampling]:
    """How each of the `n` choices of a prompt samples; only the seed differs between them.

    A seed of the client's gives the same choices again, whatever else is in the request. Without one, each
    prompt draws its own, so that equal prompts in one request get different answers.
    """
    seed = secrets.randbits(63) if seed is None else seed
    return [msgspec.structs.replace(base, seed=choice_seed(seed, choice)) for choice in range(n)]


def choice_seed(seed: int, choice: int) -> int:
    """63 bits. Choice 0 has the request's own seed, so that it is the answer that `n: 1` gives."""
    if choice == 0:
        return seed & SEED_MASK
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def sampling_of(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    card: ModelCard,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> Sampling:
    """What is not the request's own field: as in Sampling. Raises RequestError for a token id outside the
    vocabulary."""
    stop_token_ids = request.stop_token_ids or ()
    logit_bias = request.logit_bias or ()
    allowed = request.allowed_token_ids or ()
    check_vocabulary(stop_token_ids, card, "stop_token_ids")
    check_vocabulary(allowed, card, "allowed_token_ids")
    check_vocabulary([token for token, _ in logit_bias], card, "logit_bias")
    eos = () if request.ignore_eos else defaults.eos
    return Sampling(
        temperature=_given(request.temperature, defaults.temperature),
        top_p=_given(request.top_p, defaults.top_p),
        top_k=max(0, int(_given(request.top_k, defaults.top_k))),
        min_p=_given(request.min_p, 0.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        repetition_penalty=_given(_repetition_penalty(request), defaults.repetition_penalty),
        logit_bias=logit_bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_tokens=tuple(dict.fromkeys((*eos, *stop_token_ids))),
        min_tokens=request.min_tokens or 0,
        allowed_tokens=tuple(dict.fromkeys(allowed)),
        bad_words=bad_words,
        grammar=grammar,
    )


def _repetition_penalty(request: GenerationRequest) -> float | None:
    one, other = request.repetition_penalty, request.repeat_penalty
    if one is not None and other is not None and one != other:
        message = "'repeat_penalty' and 'repetition_penalty' mean the same and differ: give only one"
        raise RequestError(message, param="repeat_penalty")
    return other if one is None else one


def check_vocabulary(tokens: tuple[int, ...] | list[int], card: ModelCard, param: str) -> None:
    """Raises RequestError when an id is not one of the model's. `tokens` are at least 0."""
    largest = max(tokens, default=0)
    if largest >= card.vocab_size:
        message = f"{param!r} holds token id {largest}; this model's ids are 0 to {card.vocab_size - 1}"
        raise RequestError(message, param=param)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


# The bodies of the endpoints, field by field.
#
# A field of OpenAI's, vLLM's or SGLang's servers is in one of three groups: it does something; it is accepted, since
# no answer of this server would be another without it; or it is refused by name, since to ignore it would change one.


MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_BAD_WORDS = 256


def _parse_truncation(value: Any) -> int:
    if type(value) is not int or value < -1 or value == 0:
        raise refuse("must be -1 or an integer of at least 1")
    return value


Truncation = Checked(_parse_truncation, {"type": "integer", "minimum": -1, "not": {"const": 0}})
BestOf = Checked(fields.parse_count, {"enum": [1]})


class StreamOptions(Strict):
    include_usage: bool | None = fields.boolean()
    continuous_usage_stats: bool | None = fields.boolean()
    """Usage so far in every event."""
    include_obfuscation: bool | None = fields.boolean()
    """Padding against traffic analysis: no answer would be another, and none is made."""


class GenerationRequest(Strict):
    """What all generating endpoints share. None means: not given."""

    model: str | None = fields.model_name()
    temperature: float | None = fields.number(0, 2)
    top_p: float | None = fields.number(0, 1)
    top_k: int | None = fields.integer(-1, fields.MAX_INT)
    """0 and -1 are both off; -1 is vLLM's word."""
    min_p: float | None = fields.number(0, 1)
    seed: int | None = fields.seed()
    presence_penalty: float | None = fields.number(-2, 2)
    frequency_penalty: float | None = fields.number(-2, 2)
    repetition_penalty: float | None = fields.number(0.01, 100)
    repeat_penalty: float | None = fields.number(0.01, 100)
    """llama.cpp's and Ollama's word for `repetition_penalty`."""
    logit_bias: Annotated[Any, LogitBias] = None
    allowed_token_ids: Annotated[Any, SomeTokenIds] = None
    bad_words: Annotated[Any, fields.texts(0, MAX_BAD_WORDS, fields.MAX_LABEL_CHARS)] = None
    max_tokens: int | None = fields.num_tokens(1)
    min_tokens: int | None = fields.integer(0, fields.MAX_INT)
    n: int | None = fields.integer(1, MAX_CHOICES)
    stop: Annotated[Any, Stops] = None
    stop_token_ids: Annotated[Any, TokenIds] = None
    include_stop_str_in_output: bool | None = fields.boolean()
    no_stop_trim: bool | None = fields.boolean()
    """SGLang's word for `include_stop_str_in_output`."""
    ignore_eos: bool | None = fields.boolean()
    skip_special_tokens: bool | None = fields.boolean()
    spaces_between_special_tokens: bool | None = fields.boolean()
    """The tokenizers served here put no spaces there of their own, so both values say the same."""
    stream: bool | None = fields.boolean()
    stream_options: StreamOptions | None = Field(default=None, description="an object")
    prompt_logprobs: int | None = fields.integer(0, MAX_LOGPROBS)
    truncate_prompt_tokens: Annotated[Any, Truncation] = None
    """So many tokens of the prompt stay; -1: as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = Field(default=None, description='"left" or "right"')
    add_special_tokens: bool | None = fields.boolean()
    return_token_ids: bool | None = fields.boolean()
    return_tokens_as_token_ids: bool | None = fields.boolean()
    """Log-probabilities name tokens as `token_id:17`."""
    cache_salt: str | None = fields.label()

    response_format: ResponseFormat | None = Field(default=None, description="an object with a type")
    structured_outputs: StructuredOutputs | None = Field(default=None, description="an object")
    guided_json: Annotated[Any, SchemaField] = None
    guided_regex: str | None = fields.regex()
    guided_choice: Annotated[Any, fields.texts(1, structured.MAX_CHOICES, fields.MAX_STOP_CHARS)] = None
    guided_grammar: str | None = fields.text()
    regex: str | None = fields.regex()
    """SGLang's word for `guided_regex`."""
    json_schema: Annotated[Any, SchemaField] = None
    ebnf: str | None = fields.text()
    """SGLang's words for `guided_json` and `guided_grammar`."""

    # Accepted: no answer would be another without them.
    user: str | None = fields.label()
    metadata: dict[str, Any] | None = fields.free_object()
    store: bool | None = fields.boolean()
    service_tier: Annotated[Any, only("auto", "default", "flex", "scale", "priority", "fast")] = None
    safety_identifier: str | None = fields.label()
    prompt_cache_key: str | None = fields.label()
    prompt_cache_retention: str | None = fields.label()
    prompt_cache_options: dict[str, Any] | None = fields.free_object()
    request_id: str | None = fields.label()
    rid: str | None = fields.label()
    session_id: str | None = fields.label()
    guided_decoding_backend: str | None = fields.label()
    cache_prompt: bool | None = fields.boolean()
    id_slot: int | None = fields.integer(-1, fields.MAX_INT)
    """llama.cpp's: prompts are cached here whatever a request says, wherever that is."""
    stream_interval: int | None = fields.integer(1, fields.MAX_INT)

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
    add_generation_prompt: bool | None = fields.boolean()
    continue_final_message: bool | None = fields.boolean()
    chat_template_kwargs: dict[str, Any] | None = fields.free_object()
    documents: list[dict[str, Any]] | None = Field(default=None, description="a list of objects")
    tools_: Tools[Tool] | None = tools()
    chat_template: Annotated[Any, Refused] = None
    media_io_kwargs: Annotated[Any, only({})] = None

    @property
    def tools(self) -> list[Tool] | None:
        """Those that the model is told of."""
        return functions(self.tools_)


class ChatRequest(GenerationRequest, TemplateFields):
    max_completion_tokens: int | None = fields.num_tokens(1)
    logprobs: bool | None = fields.boolean()
    top_logprobs: int | None = fields.integer(0, MAX_LOGPROBS)
    tool_choice: Annotated[Any, ToolChoice] = None
    parallel_tool_calls: bool | None = fields.boolean()
    reasoning_effort: str | None = fields.label()
    """For the chat template, as it is."""

    verbosity: str | None = fields.label()
    prediction: dict[str, Any] | None = fields.free_object()
    include_reasoning: bool | None = fields.boolean()
    separate_reasoning: bool | None = fields.boolean()
    stream_reasoning: bool | None = fields.boolean()

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
            return (fields.parse_token_ids(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) for item in value):
            return tuple(fields.parse_token_ids(item) for item in value)
    raise refuse("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


_TEXT = {"type": "string", "minLength": 1}
_TOKENS = {"type": "array", "items": fields.TOKEN, "minItems": 1}
_TEXTS, _LISTS = ({"type": "array", "items": items, "minItems": 1} for items in (_TEXT, _TOKENS))
Prompts = Checked(_parse_prompts, {"anyOf": [_TEXT, _TOKENS, _TEXTS, _LISTS]}, nullable=False)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[Any, Prompts]
    max_tokens: int | None = fields.num_tokens(0)
    """0 with `echo`: nothing but the prompt."""
    logprobs: int | None = fields.integer(0, MAX_LOGPROBS)
    echo: bool | None = fields.boolean()
    suffix: Annotated[Any, only("")] = None
    prompt_embeds: Annotated[Any, Refused] = None


class TokenizeFields(Strict):
    model: str | None = fields.model_name()
    add_special_tokens: bool | None = fields.boolean()
    return_token_strs: bool | None = fields.boolean()


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
    model: str | None = fields.model_name()
    tokens: Annotated[Any, Checked(fields.parse_token_ids, TokenIds.schema, nullable=False)]
