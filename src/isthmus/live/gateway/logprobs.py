"""Log-probabilities of an answer's tokens, as chat completions and responses write them."""

from __future__ import annotations

import msgspec

from isthmus.live.gateway.choice import Score
from isthmus.live.gateway.wire import TokenBytes, finite, token_text


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def scored(score: Score, token_bytes: TokenBytes, *, as_ids: bool) -> TokenLogprob:
    """`as_ids`: tokens are named by their ids."""

    def entry(token: int, logprob: float) -> TopLogprob:
        raw = token_bytes(token)
        text = f"token_id:{token}" if as_ids else token_text(raw)
        return TopLogprob(text, finite(logprob), list(raw))

    chosen = entry(score.token, score.logprobs.chosen)
    top = [entry(token, logprob) for token, logprob in score.logprobs.top]
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)
