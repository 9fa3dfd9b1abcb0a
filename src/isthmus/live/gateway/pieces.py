"""Tokens of long texts of which most came before, such as conversations: text between special tokens is tokenised by
itself, and remembered."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

Encode = Callable[[str], list[int]]


class Pieces:
    """Up to `most_bytes` of pieces with their tokens, least recently used out first. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, encode: Encode, most_bytes: int) -> None:
        """`encode`: tokenises a text without adding tokens to it."""
        self._encode, self._most_bytes, self._num_bytes = encode, most_bytes, 0
        self._special = {
            added.content: token for token, added in tokenizer.get_added_tokens_decoder().items()
            if not added.normalized
        }  # fmt: skip
        # Where two begin at one place, the library takes the longest as well.
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(longest_first)})").split
        self._known: OrderedDict[str, list[int]] = OrderedDict()

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, special ones included, as `encode` of the whole would."""
        found: list[int] = []
        for piece in self._split(text):
            token = self._special.get(piece)
            if token is not None:
                found.append(token)
            elif piece:
                found += self._tokens(piece)
        return found

    def _tokens(self, piece: str) -> list[int]:
        known = self._known.get(piece)
        if known is not None:
            self._known.move_to_end(piece)
            return known
        known = self._known[piece] = self._encode(piece)
        self._num_bytes += _size(piece, known)
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= _size(*self._known.popitem(last=False))
        return known


def _size(piece: str, tokens: list[int]) -> int:
    """Bytes of an entry: of its text, and of a list of integers."""
    return 4 * len(piece) + 40 * len(tokens) + 256


def are_independent(tokenizer: Tokenizer) -> bool:
    """Whether the text between special tokens has the same tokens wherever it stands: no part of the tokenizer looks
    beyond them, or at where the text begins."""
    told = json.loads(tokenizer.to_str())
    added = [each for each in told["added_tokens"] if not each["normalized"]]
    if not added or any(each["lstrip"] or each["rstrip"] or each["single_word"] for each in added):
        return False
    parts = [
        *_parts(told.get("normalizer"), "normalizers"),
        *_parts(told.get("pre_tokenizer"), "pretokenizers"),
    ]
    return all(part["type"] in _LOCAL and not part.get("add_prefix_space") for part in parts)


_LOCAL = frozenset(("NFC", "NFKC", "ByteLevel", "Split", "Digits", "Punctuation"))


def _parts(part: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[members]:
            yield from _parts(each, members)
    else:
        yield part
