"""From a parsed request to a prepared one: the jobs to submit, and the options of its answer. Here a request meets
the model: tokens, lengths, vocabulary, defaults."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.core.errors import RequestError
from isthmus.core.types import Job, ModelCard, RequestId, Reuse, Sampling
from isthmus.live.gateway.headers import RequestTerms, reuse_of, salt_of
from isthmus.live.gateway.http import unknown_model
from isthmus.live.gateway.messages import left_out
from isthmus.live.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Prompt,
    TemplateFields,
    answer_tokens,
    check_chars,
    check_prompt,
    check_vocabulary,
    sampling_of,
    samplings,
    truncated,
)
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.structured import check_grammar, grammar_of
from isthmus.live.gateway.tokenizer import GatewayTokenizer
from isthmus.live.gateway.tool_use import ToolUse, call_grammar, definitions, tool_use
from isthmus.live.gateway.tools import Format

DEFAULT_COMPLETION_TOKENS = 16
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Writing:
    """How an answer is written. `usage`: None in no event, False in the last, True in each."""

    stream: bool
    usage: bool | None
    stops: tuple[str, ...]
    shows_stop: bool
    shows_special: bool
    token_ids: bool
    tokens_as_ids: bool
    echo: bool
    only_echo: bool
    prompt_logprobs: int | None

    @property
    def counts(self) -> bool:
        """Whether usage is part of a streamed answer."""
        return self.usage is not None


@dataclass(frozen=True)
class PreparedRequest:
    """One accepted HTTP request. Choice `k` of prompt `p` is `jobs[p * n + k]`. `texts` of the prompts and `offsets`
    of their tokens: where the answer echoes them; `repeated`: request fields that a ResponsesReply repeats;
    `left_out`: parts of the request without effect, of which the client is told."""

    id: str
    created_s: int
    model: str
    prompts: tuple[Tokens, ...]
    texts: tuple[str, ...]
    offsets: tuple[Tokens, ...]
    n: int
    jobs: tuple[Job, ...]
    writing: Writing
    tools: ToolUse | None = None
    repeated: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def reuse(self) -> Reuse:
        """The KV reuse of all its jobs."""
        return self.jobs[0].reuse


@dataclass(frozen=True)
class _PreparedPrompt:
    """One prompt and the most tokens of its answers. `text` and the `offsets` of tokens in it: where the answer
    echoes the prompt."""

    tokens: Tokens
    max_tokens: int
    text: str = ""
    offsets: Tokens = ()


@dataclass(frozen=True)
class RequestPreparer:
    """Prepares requests for one model. `tool_format`: of the calls that the model writes, None if unknown. `hex_id`
    makes an answer's id unique."""

    card: ModelCard
    tokenizer: GatewayTokenizer
    settings: GatewaySettings
    tool_format: Format | None

    def chat(
        self, request: ChatRequest, hex_id: str, terms: RequestTerms, prefix: str = "chatcmpl-"
    ) -> PreparedRequest:
        """`prefix`: of the answer's id. Raises RequestError."""
        self.check_model(request.model)
        if len(request.tools or ()) > self.settings.max_tools:
            raise over("tools", len(request.tools or ()), self.settings.max_tools)
        tools = tool_use(request, self.tool_format)
        grammar = self._answer_grammar(request)
        if tools and (tools.forced or tools.strict or tools.constrained):
            grammar = call_grammar(request, tools, grammar, self.tokenizer, self.settings.grammar)
        sampling = self._sampling(request, _chat_logprobs(request), request.prompt_logprobs, grammar)
        asked, param = _chat_max_tokens(request)
        tokens = truncated(self.chat_tokens(request, request.add_special_tokens), request, asked, self.card)
        check_prompt(len(tokens), self.card, "messages")
        max_tokens = answer_tokens(len(tokens), asked, self.card, param=param, default=None)
        prompt = _PreparedPrompt(tokens, max_tokens)
        prepared = self._prepared(f"{prefix}{hex_id}", request, terms, sampling, [prompt], tools)
        return replace(prepared, left_out=tuple(dict.fromkeys(left_out(request.tools_))))

    def completion(self, request: CompletionRequest, hex_id: str, terms: RequestTerms) -> PreparedRequest:
        """Raises RequestError."""
        self.check_model(request.model)
        asked = max((k for k in (request.prompt_logprobs, _echoed(request)) if k is not None), default=None)
        sampling = self._sampling(request, request.logprobs, asked, self._answer_grammar(request))
        self._check_count(len(request.prompt), request.n or 1)
        prompts = [self._prompt(prompt, request) for prompt in request.prompt]
        return self._prepared(f"cmpl-{hex_id}", request, terms, sampling, prompts)

    def chat_tokens(self, request: TemplateFields, add_special_tokens: bool | None) -> Tokens:
        """Tokens of a conversation. Raises RequestError."""
        if request.add_generation_prompt and request.continue_final_message:
            message = "'add_generation_prompt' and 'continue_final_message' contradict each other: give one"
            raise RequestError(message, param="continue_final_message")
        if len(request.messages) > self.settings.max_messages:
            raise over("messages", len(request.messages), self.settings.max_messages)
        messages = [message.for_template() for message in request.messages]
        text = self.tokenizer.render(messages, **_template_options(request))
        if isinstance(request, ChatRequest):
            self._check_chars(text, request, "messages")
        return tuple(self.tokenizer.encode_text(text, add_special_tokens=bool(add_special_tokens)))

    def _check_chars(self, text: str, request: GenerationRequest, param: str) -> None:
        """Raises RequestError."""
        if request.truncate_prompt_tokens is None:
            check_chars(len(text), self.tokenizer.least_tokens(len(text)), self.card, param)

    def check_model(self, name: str | None) -> None:
        """Raises HttpError. No name means the served model."""
        if name is not None and name not in self.card.names:
            raise unknown_model(name, self.card.names)

    def _answer_grammar(self, request: GenerationRequest) -> str:
        """The grammar of an answer without calls; "" if it is free. Raises RequestError."""
        grammar, param = grammar_of(request)
        if grammar:
            check_grammar(grammar, param, self.tokenizer.for_grammars, self.settings.grammar)
        return grammar

    def _sampling(
        self, request: GenerationRequest, logprobs: int | None, prompt_logprobs: int | None, grammar: str
    ) -> Sampling:
        """`grammar`: of the answer, "" if it is free. Raises RequestError."""
        if request.best_of not in (None, request.n or 1):
            message = "'best_of' is supported only as equal to 'n': answers are not ranked"
            raise RequestError(message, param="best_of")
        if request.stream and request.prompt_logprobs is not None:
            message = "'prompt_logprobs' come in one piece: leave it out, or do not stream"
            raise RequestError(message, param="prompt_logprobs")
        return sampling_of(
            request,
            self.tokenizer.generation,
            self.card,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad_words=self.tokenizer.words_as_tokens(request.bad_words or ()),
            grammar=grammar,
        )

    def _prepared(
        self,
        answer_id: str,
        request: GenerationRequest,
        terms: RequestTerms,
        base: Sampling,
        prompts: list[_PreparedPrompt],
        tools: ToolUse | None = None,
    ) -> PreparedRequest:
        """Raises RequestError."""
        n = request.n or 1
        reuse = reuse_of(terms, _scored(request), self.settings, self.card)
        weight = self.settings.shares.weight_of(terms.tenant)
        choices = [(prompt, sampling) for prompt in prompts for sampling in samplings(base, request.seed, n)]
        jobs = [
            Job(
                request=RequestId(f"{answer_id}-{at}"),
                tokens=prompt.tokens,
                max_tokens=prompt.max_tokens,
                sampling=sampling,
                tenant=terms.tenant or request.user or "",
                salt=salt_of(terms.tenant, request.cache_salt or ""),
                priority=terms.priority,
                ttft_ms=terms.ttft_ms,
                tbt_ms=terms.tbt_ms,
                reuse=reuse,
                weight=weight,
            )
            for at, (prompt, sampling) in enumerate(choices)
        ]
        return PreparedRequest(
            id=answer_id,
            created_s=int(time.time()),
            model=self.card.name,
            prompts=tuple(prompt.tokens for prompt in prompts),
            texts=tuple(prompt.text for prompt in prompts),
            offsets=tuple(prompt.offsets for prompt in prompts),
            n=n,
            jobs=tuple(jobs),
            writing=_writing(request),
            tools=tools,
        )

    def _check_count(self, num_prompts: int, n: int) -> None:
        most = self.settings.max_sequences
        if num_prompts * n > most:
            message = (
                f"{num_prompts} prompts with n = {n} are {num_prompts * n} sequences; ask for at most {most}"
            )
            raise RequestError(message, param="prompt")

    def _prompt(self, prompt: Prompt, request: CompletionRequest) -> _PreparedPrompt:
        """Raises RequestError."""
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            self._check_chars(prompt, request, "prompt")
            # An empty text stays empty: special tokens alone are no prompt.
            tokens = tuple(self.tokenizer.encode_text(prompt, add_special_tokens=special)) if prompt else ()
        else:
            tokens = prompt
        asked = request.max_tokens
        if asked == 0 and not request.echo:
            raise RequestError("'max_tokens' may be 0 only with echo: true", param="max_tokens")
        default = DEFAULT_COMPLETION_TOKENS
        kept = truncated(tokens, request, default if asked is None else asked, self.card)
        check_prompt(len(kept), self.card, "prompt", 0 if asked == 0 else 1)
        check_vocabulary(kept, self.card, "prompt")
        most = answer_tokens(len(kept), asked, self.card, param="max_tokens", default=default)
        found = _PreparedPrompt(kept, most)
        if not request.echo:
            return found
        sent = prompt if isinstance(prompt, str) and kept == tokens else None
        text = self.tokenizer.prompt_text(kept, alone=asked == 0) if sent is None else sent
        scored = request.logprobs is not None
        return replace(found, text=text, offsets=self.tokenizer.offsets(kept, text) if scored else ())


def over(param: str, count: int, most: int) -> RequestError:
    """The refusal of a list that is longer than its limit."""
    message = f"{param!r} has {count} entries; this server takes up to {most} (limits.{param})"
    return RequestError(message, param=param)


def _writing(request: GenerationRequest) -> Writing:
    options = request.stream_options
    counts = options is not None and bool(options.include_usage)
    return Writing(
        stream=bool(request.stream),
        usage=bool(options and options.continuous_usage_stats) if counts else None,
        stops=request.stop or (),
        shows_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
        shows_special=request.skip_special_tokens is False,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
        only_echo=request.max_tokens == 0,
        prompt_logprobs=request.prompt_logprobs,
    )


def _template_options(request: TemplateFields) -> dict[str, Any]:
    """The arguments of `ChatTemplate.render` that a request sets."""
    continues = bool(request.continue_final_message)
    opens = request.add_generation_prompt
    extra = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", request.reasoning_effort)
    return {
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
        "chat_template_kwargs": extra,
        "documents": request.documents,
        "tools": definitions(request),
    }


def _scored(request: GenerationRequest) -> str:
    """The fields that ask for log-probabilities of the prompt, "" if none."""
    if request.prompt_logprobs is not None:
        return "'prompt_logprobs'"
    echoed = isinstance(request, CompletionRequest) and _echoed(request) is not None
    return "'echo' with 'logprobs'" if echoed else ""


def _echoed(request: CompletionRequest) -> int | None:
    """The number of log-probabilities that an echoed prompt needs; None without."""
    return request.logprobs if request.echo else None


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("'top_logprobs' is allowed only with logprobs: true", param="top_logprobs")
    return None


def _chat_max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The client's limit, and the name of its field."""
    if request.max_completion_tokens is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens not in (None, request.max_completion_tokens):
        message = "'max_tokens' and 'max_completion_tokens' mean the same and differ: give only one"
        raise RequestError(message, param="max_tokens")
    return request.max_completion_tokens, "max_completion_tokens"
