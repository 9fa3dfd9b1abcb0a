"""From a request's fields to the cluster's `Sampling`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from isthmus.core.errors import RequestError
from isthmus.core.types import ModelCard, Sampling
from isthmus.live.gateway.generation import GenerationDefaults
from isthmus.live.gateway.requests import GenerationRequest

SEED_MASK = 2**63 - 1


@dataclass(frozen=True)
class Sampler:
    """How every choice of one request samples; only the seed differs between them."""

    base: Sampling
    seed: int | None

    def for_prompt(self, n: int) -> list[Sampling]:
        """One Sampling for each of the `n` choices of a prompt.

        A seed of the client's gives the same choices again, whatever else is in the request. Without one, each
        prompt draws its own, so that equal prompts in one request get different answers.
        """
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return [msgspec.structs.replace(self.base, seed=choice_seed(seed, choice)) for choice in range(n)]


def choice_seed(seed: int, choice: int) -> int:
    """63 bits. Choice 0 has the request's own seed, so that it is the answer that `n: 1` gives."""
    if choice == 0:
        return seed & SEED_MASK
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def sampler_of(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    card: ModelCard,
    *,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
) -> Sampler:
    """What is not the request's own field: as in Sampling. Raises RequestError for a token id outside the
    vocabulary."""
    stop_token_ids = request.stop_token_ids or ()
    logit_bias = request.logit_bias or ()
    allowed = request.allowed_token_ids or ()
    check_vocabulary(stop_token_ids, card, "stop_token_ids")
    check_vocabulary(allowed, card, "allowed_token_ids")
    check_vocabulary([token for token, _ in logit_bias], card, "logit_bias")
    eos = () if request.ignore_eos else defaults.eos
    base = Sampling(
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
    return Sampler(base, request.seed)


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
