"""Ids, spans and request facts that cross rooms. A leaf: imports nothing of ours."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
BlockName = bytes | int
"""16 bytes for blocks of a model; a published trace's own numbers serve as well. Opaque outside `blocks`."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    ATTENTION = "attention"
    """Holds KV of requests that are computed elsewhere, and attends to it."""


PREFILL, DECODE, MIXED, ATTENTION = Role  # looking a member up in its class takes long


class Tier(StrEnum):
    """Where in a node a cached block lies."""

    MEMORY = "memory"
    DISK = "disk"


MEMORY, DISK = Tier


class FinishReason(StrEnum):
    """Why a request stopped producing tokens, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Sampling(msgspec.Struct, frozen=True):
    """How to choose the next token. `temperature == 0` is greedy.

    The draw for output token i depends on (`seed`, i) alone, so neither the batch nor the node changes it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and answer are less likely to come again."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: no log-probabilities; n: the chosen token's and the n most likely."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, which are then all computed: none comes from a cache."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the answer; the gateway leaves this empty for `ignore_eos`."""
    min_tokens: int = 0
    """No stop token comes before so many output tokens."""
    allowed_tokens: tuple[int, ...] = ()
    """No other token comes; empty: any may."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the answer must not contain."""
    grammar: str = ""
    """What the answer's text must match, in llguidance's Lark; "": anything. Where it is complete only the model's
    end tokens are left, and they end the answer, also for `ignore_eos` and before `min_tokens`."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities of the model itself, before temperature, penalties and bias."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """Of the chosen token among all, from 1; only for tokens of a prompt."""


class Span(msgspec.Struct, frozen=True):
    """Half-open range of token positions `[start, stop)`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Reuse(StrEnum):
    """KV of earlier prompts that a request may be computed with. EXACT: of the same prefix, with equal results; CHUNKS:
    also of the same text elsewhere; SEMANTIC: also of a prompt of nearly the same meaning."""

    EXACT = "exact"
    CHUNKS = "chunks"
    SEMANTIC = "semantic"


class Reused(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt by the source of their KV: the cached prefix, the same text elsewhere, or a similar prompt.
    `recomputed`: candidates that were computed all the same."""

    exact: int
    moved: int
    similar: int
    recomputed: int


class Tenant(msgspec.Struct, frozen=True):
    """A tenant that shares the cluster; `weight`: of its share. Without a name: all requests of a deployment without
    API keys."""

    name: str = ""
    weight: float = 1.0


NOBODY = Tenant()


def sharing(name: str, weight: float) -> Tenant:
    """The tenant whose share a request is computed in; `NOBODY` without a weight."""
    return Tenant(name, weight) if weight else NOBODY


class Shares(msgspec.Struct, frozen=True):
    """Weights of `tenants`, and the `default` weight of all others; 0: no share."""

    tenants: tuple[Tenant, ...] = ()
    default: float = 0.0

    def weight_of(self, tenant: str | None) -> float:
        own = (each.weight for each in self.tenants if each.name == tenant)
        return next(own, self.default) if tenant else 0.0


class Job(msgspec.Struct, frozen=True):
    """One sequence to generate, as the gateway hands it to the cluster.

    `max_tokens`: 0 if only its prompt is scored (the one token that ends it takes no memory or context). Blocks of
    different `salt` never match. `tenant` is a label for accounting; with a `weight` above 0 it has a share (`Tenant`).
    A higher `priority` is refused last; `ttft_ms`, `tbt_ms`: its own limits, None takes the deployment's. `reuse`: KV
    that it may be computed with.
    """

    request: RequestId
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    reuse: Reuse = Reuse.EXACT
    weight: float = 0.0


class PassedRequest(msgspec.Struct, frozen=True):
    """An HTTP request for a server that runs already, passed on as it came. `target`: path and query.

    Read of its body: `model`, "" if it names none; `prefix`: the bytes of its prompt as they stand there, of which
    requests that begin alike have a common beginning; `max_tokens`: 0 if not given; `is_streamed`: the answer comes as
    server-sent events; `tokens`: of its prompt, uint32 in this machine's order, empty if they are not known; and
    `cache_salt`, that the server keeps apart by. The others are as in `Job`.
    """

    request: RequestId
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    model: str = ""
    prefix: bytes = b""
    tokens: bytes = b""
    cache_salt: str = ""
    max_tokens: int = 0
    is_streamed: bool = False
    tenant: str = ""
    salt: str = ""
    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    weight: float = 0.0


class Generated(msgspec.Struct, frozen=True):
    """Output token number `index` (0-based) of a request. `finish` is set on the last one only.

    `cached_tokens`: prompt tokens served from cache, with the first or last output token, else None. With the first
    output token, if asked for: `prompt_logprobs` of each prompt token but the first, and `reused`.
    """

    index: int
    token: int
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    reused: Reused | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """The served model as clients see it. `max_length`: of prompt and answer, in tokens; `node_length`: the longest
    that one node has memory for, 0 if that is `max_length`; `no_reuse`: why KV of its prompts cannot be moved, "" if
    it can; `aliases`: other names by which clients may ask for it."""

    name: str
    max_length: int
    vocab_size: int
    created_s: int
    node_length: int = 0
    no_reuse: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of the model, that of answers first."""
        return self.name, *self.aliases
