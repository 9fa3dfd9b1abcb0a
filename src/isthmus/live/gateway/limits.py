"""Lengths: how long a prompt may be, and how long the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.core.errors import RequestError
from isthmus.core.types import ModelCard

if TYPE_CHECKING:
    from isthmus.live.gateway.requests import GenerationRequest

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
