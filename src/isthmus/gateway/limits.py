"""Lengths: how long a prompt may be, and how long the answer."""

from __future__ import annotations

from isthmus.errors import RequestError
from isthmus.types import ModelCard

TOO_LONG = "context_length_exceeded"


def check_prompt(num_tokens: int, card: ModelCard, param: str) -> None:
    """Raises RequestError when a prompt is empty or leaves no room for an answer."""
    if num_tokens == 0:
        raise RequestError(f"{param!r} is empty: give at least one token", param=param)
    if num_tokens >= card.max_length:
        message = (
            f"This model's maximum context length is {card.max_length} tokens, prompt and answer together; "
            f"{param!r} has {num_tokens} tokens. Please shorten it"
        )
        raise RequestError(message, param=param, code=TOO_LONG)


def answer_tokens(
    num_prompt_tokens: int, asked: int | None, card: ModelCard, *, param: str, default: int | None
) -> int:
    """Most tokens the answer may have. `asked`: by the client, in the field `param`.

    `default` None: the rest of the context. Raises RequestError when `asked` does not fit behind the prompt.
    """
    rest = card.max_length - num_prompt_tokens
    if asked is None:
        return rest if default is None else min(default, rest)
    if asked > rest:
        message = (
            f"This model's maximum context length is {card.max_length} tokens; the prompt has "
            f"{num_prompt_tokens} and {param!r} asks for {asked} more. Ask for at most {rest}"
        )
        raise RequestError(message, param=param, code=TOO_LONG)
    return asked
