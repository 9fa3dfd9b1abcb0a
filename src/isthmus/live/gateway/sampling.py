"""From a request's fields to what a cluster is given: lengths of prompt and answer, and `Sampling`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.core.errors import RequestError
from isthmus.core.types import ModelCard

if TYPE_CHECKING:
    from isthmus.live.gateway.requests import GenerationRequest
import secrets
from hashlib import blake2b

import msgspec

from isthmus.core.types import Sampling
from isthmus.live.gateway.requests import GenerationRequest
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
