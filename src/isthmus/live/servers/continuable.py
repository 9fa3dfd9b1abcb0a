"""Which answers another server could go on with: by the fields of their requests.

A field that is not named here makes an answer one that cannot be continued: tools, log-probabilities and reasoning are
more than a text, and of a vendor's field nothing is known.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULT_TOKENS = 16
"""Limit of a completion that gives none."""


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Repeated(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that a continuation takes from its request."""

    model: str = ""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    """Counts prompt and answer alike."""
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    stream_options: _StreamOptions | None = None


class Asked(Repeated, forbid_unknown_fields=True):
    """All fields of a request whose answer may be continued. None: not given."""

    stream: bool | None = None
    messages: Raw = Raw()
    prompt: Raw = Raw()
    temperature: float | None = None
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | UnsetType = UNSET

    # Without effect on greedy tokens, or on the prompt alone.
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None

    # Counted, or followed, from the beginning of an answer.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: Any = None
    structured_outputs: Any = None
    bad_words: Any = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def shows_ids(self) -> bool:
        """Whether the client asks for ids of tokens."""
        return self.return_token_ids is True

    def is_repeatable(self, path: str) -> bool:
        """Whether the request gives one answer of text, streamed, and the same one again."""
        is_of_path = (path == CHAT) is bool(self.messages)
        is_sure = self.temperature == 0 or self.seed is not None
        is_one = (
            self.n in (None, 1) and self.best_of in (None, 1) and _ONE_PROMPT.match(self.prompt) is not None
        )
        is_text = not self.logprobs and all(self.stops) and self.return_token_ids is not False
        return self.stream is True and is_of_path and is_sure and is_one and is_text

    @property
    def is_extendable(self) -> bool:
        """Whether a prompt with the first tokens of the answer gives the others."""
        counted = (
            self.presence_penalty, self.frequency_penalty, self.response_format, self.structured_outputs,
            self.bad_words, self.stops and self.min_tokens,
        )  # fmt: skip
        return self.temperature == 0 and not any(counted) and _is_text(self.messages)

    def limit(self, path: str, kind: str) -> int | UnsetType | None:
        """The most tokens of an answer; None: as many as the server has room for, UNSET: nothing says how many a
        completion may have to be as long as this chat of a server of that kind."""
        is_ours = kind == "isthmus"
        if path == CHAT:
            limit = self.max_completion_tokens or (None if self.max_tokens is UNSET else self.max_tokens)
            return UNSET if limit is None and is_ours else limit
        is_default = self.max_tokens is UNSET or (self.max_tokens is None and is_ours)
        return DEFAULT_TOKENS if is_default else self.max_tokens


_ONE_PROMPT = re.compile(rb'\Z|"|\[\s*\d')
"""No prompt (but messages), a text, or a list of tokens."""


def _is_text(messages: Raw) -> bool:
    """Whether the tokens of a conversation are all of it: pictures are more."""
    for message in msgspec.json.decode(messages) if messages else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.keys() - {"type", "text", "cache_control"}:
                return False
    return True


_read = msgspec.json.Decoder(Asked).decode


def read_asked(path: str, body: bytes) -> Asked | None:
    """Returns the fields of a request whose answer may be continued, None for any other."""
    try:
        asked = _read(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return asked if asked.is_repeatable(path) else None
