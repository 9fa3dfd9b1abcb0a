"""`/tokenize` and `/detokenize`, as vLLM has them: what the model sees of a text or a conversation."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.live.gateway.prepare import RequestPreparer
from isthmus.live.gateway.requests import DetokenizeRequest, TokenizeChat, TokenizeText
from isthmus.live.gateway.sampling import check_vocabulary
from isthmus.live.gateway.wire import token_text


class TokenizeReply(msgspec.Struct):
    """`token_strs`: of each token, where they are asked for."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeReply(msgspec.Struct):
    prompt: str


@dataclass(frozen=True)
class TokenizeEndpoints:
    preparer: RequestPreparer

    def tokenize(self, request: TokenizeText | TokenizeChat) -> TokenizeReply:
        """Raises RequestError."""
        preparer, special = self.preparer, request.add_special_tokens
        preparer.check_model(request.model)
        if isinstance(request, TokenizeChat):
            tokens = preparer.chat_tokens(request, special)
        else:
            tokens = tuple(
                preparer.tokenizer.encode_text(request.prompt, add_special_tokens=special is not False)
            )
        texts: list[str] | UnsetType = UNSET
        if request.return_token_strs:
            token_bytes = preparer.tokenizer.token_bytes
            texts = [token_text(token_bytes(token)) for token in tokens]
        return TokenizeReply(len(tokens), preparer.card.max_length, tokens, texts)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Raises RequestError."""
        preparer, tokens = self.preparer, request.tokens
        preparer.check_model(request.model)
        check_vocabulary(tokens, preparer.card, "tokens")
        return DetokenizeReply(preparer.tokenizer.decode(tokens, special=True))
