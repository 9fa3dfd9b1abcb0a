"""Names of the blocks of prompts for plain servers: of tokens, with the servers' own block size, where tokens are
known, else of text.

Names of tokens share what the servers share: prompts of one model or adapter, with equal `cache_salt`, whoever asks.
Names of text also keep tenants apart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.types import BlockName, PassedRequest
from isthmus.live.servers.told import Description, aliases_of

TOKEN_BYTES, BLOCK_TOKENS = 4, 16
"""A text is counted in bytes, four a token; a block has so many tokens where nobody says how many."""
MAX_NAMERS = 1024
MAX_NAMED_BYTES = 1 << 18
"""Of a prompt, in text or tokens, so that naming takes a few milliseconds at most; what follows counts as uncached."""
MAX_BLOCK_TOKENS = 1 << 12


class Named(msgspec.Struct, frozen=True):
    """A prompt: its length in tokens and the names of its full blocks. `is_exact`: they are of tokens."""

    num_tokens: int
    names: tuple[BlockName, ...]
    is_exact: bool = False


class Naming:
    """Names for the servers of one pool, as the `first` of them describes itself. `knows_tokens`: requests come with
    tokens; else blocks have `BLOCK_TOKENS`."""

    def __init__(self, first: Description, *, knows_tokens: bool) -> None:
        self.knows_tokens = knows_tokens
        told = first.block_tokens if knows_tokens else 0
        self.block_tokens = told if 0 < told <= MAX_BLOCK_TOKENS else BLOCK_TOKENS
        self._default = first.names[0] if first.names else ""
        self._weights = weights_of(first.models)
        self._namer = lru_cache(MAX_NAMERS)(self._new_namer)

    def named(self, passed: PassedRequest) -> Named:
        """Returns what a request's prompt is called."""
        is_exact = self.knows_tokens and bool(passed.tokens)
        words = passed.tokens if is_exact else passed.prefix
        num_tokens = max(1, len(words) // TOKEN_BYTES)
        part = memoryview(words)[: min(num_tokens * TOKEN_BYTES, MAX_NAMED_BYTES)]
        part = part[: len(part) // TOKEN_BYTES * TOKEN_BYTES]
        form, salt = ("tokens", passed.cache_salt) if is_exact else ("bytes", passed.salt)
        names = self._namer(self._weights_of(passed.model), salt, form).names(part.cast("I"))
        return Named(num_tokens, tuple(names), is_exact)

    def of_events(self, salt: str, adapter: str) -> BlockNamer:
        """Returns the namer of blocks that a server computed for prompts of tokens. `adapter`: "" for none."""
        return self._namer(self._weights_of(adapter), salt, "tokens")

    def _weights_of(self, model: str) -> str:
        """Returns what stands for the weights that a name asks for; the servers know unknown names."""
        return self._weights.get(model) or self._weights.get(self._default, self._default)

    def _new_namer(self, revision: str, salt: str, form: str) -> BlockNamer:
        layout = KVLayout("float32", self.block_tokens, 1, 1, 1, form=form)
        return BlockNamer(revision=revision, layout=layout, salt=salt)


def weights_of(models: tuple[dict[str, Any], ...]) -> dict[str, str]:
    """Returns for each name that a server lists the first name of the same weights. An adapter, which has a `parent`,
    has weights of its own; other names with one `root` are of one model."""
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for each in models:
        name, root = str(each["id"]), each.get("root")
        is_alias = isinstance(root, str) and bool(root) and not each.get("parent")
        found[name] = first.setdefault(str(root), name) if is_alias else name
        found |= dict.fromkeys(aliases_of(each), found[name])
    return found
