"""From a parsed request to a prepared one: the jobs to submit, and what their answer must carry.

This is where a request meets the model: tokenising, lengths, vocabulary, defaults.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from isthmus.errors import RequestError
from isthmus.gateway.limits import answer_tokens, check_prompt
from isthmus.gateway.problems import UnknownModelError
from isthmus.gateway.requests import ChatRequest, CompletionRequest, GenerationRequest, Prompt
from isthmus.gateway.sampling import Sampler, check_vocabulary, sampler_of
from isthmus.gateway.settings import GatewaySettings
from isthmus.gateway.terms import Terms
from isthmus.gateway.tokenizer import GatewayTokenizer
from isthmus.types import Job, ModelCard, RequestId

DEFAULT_COMPLETION_TOKENS = 16
Tokens = tuple[int, ...]
Result = TypeVar("Result")


@dataclass(frozen=True)
class PreparedRequest:
    """One accepted HTTP request. Choice `k` of prompt `p` is `jobs[p * n + k]`."""

    id: str
    created_s: int
    model: str
    prompts: tuple[Tokens, ...]
    n: int
    jobs: tuple[Job, ...]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool


@dataclass(frozen=True)
class RequestPreparer:
    """Turns requests into prepared ones. `hex_id` makes the answer's id unique."""

    card: ModelCard
    tokenizer: GatewayTokenizer
    settings: GatewaySettings

    async def chat(self, request: ChatRequest, hex_id: str, terms: Terms) -> PreparedRequest:
        """Raises RequestError."""
        self._check_model(request)
        sampler = sampler_of(request, _chat_logprobs(request), self.tokenizer.generation, self.card)
        asked, param = _chat_max_tokens(request)
        messages = [message.for_template() for message in request.messages]
        num_chars = sum(len(message.content) for message in request.messages)
        tokens = await self._off_loop(num_chars, lambda: self.tokenizer.encode_chat(messages))
        check_prompt(len(tokens), self.card, "messages")
        max_tokens = answer_tokens(len(tokens), asked, self.card, param=param, default=None)
        return self._prepared(f"chatcmpl-{hex_id}", request, terms, sampler, [(tuple(tokens), max_tokens)])

    async def completion(self, request: CompletionRequest, hex_id: str, terms: Terms) -> PreparedRequest:
        """Raises RequestError."""
        self._check_model(request)
        sampler = sampler_of(request, request.logprobs, self.tokenizer.generation, self.card)
        self._check_count(len(request.prompt), request.n or 1)
        num_chars = sum(len(prompt) for prompt in request.prompt if isinstance(prompt, str))
        prompts = await self._off_loop(num_chars, lambda: [self._tokens(prompt) for prompt in request.prompt])
        sized = []
        for tokens in prompts:
            check_prompt(len(tokens), self.card, "prompt")
            check_vocabulary(tokens, self.card, "prompt")
            asked, default = request.max_tokens, DEFAULT_COMPLETION_TOKENS
            sized.append(
                (tokens, answer_tokens(len(tokens), asked, self.card, param="max_tokens", default=default))
            )
        return self._prepared(f"cmpl-{hex_id}", request, terms, sampler, sized)

    def _prepared(
        self,
        answer_id: str,
        request: GenerationRequest,
        terms: Terms,
        sampler: Sampler,
        sized: list[tuple[Tokens, int]],
    ) -> PreparedRequest:
        """`sized`: each prompt with the most tokens its answers may have."""
        n = request.n or 1
        jobs: list[Job] = []
        for tokens, max_tokens in sized:
            for sampling in sampler.for_prompt(n):
                jobs.append(
                    Job(
                        request=RequestId(f"{answer_id}-{len(jobs)}"),
                        tokens=tokens,
                        max_tokens=max_tokens,
                        sampling=sampling,
                        tenant=request.user or "",
                        salt=request.cache_salt or "",
                        priority=terms.priority,
                        ttft_ms=terms.ttft_ms,
                        tbt_ms=terms.tbt_ms,
                    )
                )
        options = request.stream_options
        return PreparedRequest(
            id=answer_id,
            created_s=int(time.time()),
            model=self.card.name,
            prompts=tuple(tokens for tokens, _ in sized),
            n=n,
            jobs=tuple(jobs),
            stops=request.stop or (),
            stream=bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
            return_token_ids=bool(request.return_token_ids),
        )

    def _check_model(self, request: GenerationRequest) -> None:
        if request.model != self.card.name:
            raise UnknownModelError(request.model, self.card.name)

    def _check_count(self, num_prompts: int, n: int) -> None:
        most = self.settings.max_sequences
        if num_prompts * n > most:
            message = (
                f"{num_prompts} prompts with n = {n} are {num_prompts * n} sequences; ask for at most {most}"
            )
            raise RequestError(message, param="prompt")

    def _tokens(self, prompt: Prompt) -> Tokens:
        # An empty text stays empty: the special tokens around it alone are no prompt.
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode_text(prompt)) if prompt else ()
        return prompt

    async def _off_loop(self, num_chars: int, tokenise: Callable[[], Result]) -> Result:
        """Long texts are tokenised in a thread, so that other requests' tokens keep flowing."""
        if num_chars > self.settings.long_prompt_chars:
            return await asyncio.to_thread(tokenise)
        return tokenise()


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise RequestError("'top_logprobs' is allowed only with logprobs: true", param="top_logprobs")
    return None


def _chat_max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    """The client's limit, and the name of the field it stood in."""
    if request.max_completion_tokens is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens is not None:
        message = "'max_tokens' and 'max_completion_tokens' mean the same: give only one"
        raise RequestError(message, param="max_tokens")
    return request.max_completion_tokens, "max_completion_tokens"
