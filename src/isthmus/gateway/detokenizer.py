"""Token ids to text, one token at a time.

The pieces, put together, are exactly `decode(all tokens)`: a token is decoded together with the tokens just
before it, and what it adds is the difference. Text that ends in U+FFFD is held back, because the next token
may complete the character.

    tokens   t0 t1 t2 | t3 t4          window = t2 t3 t4: context, then what is not settled yet
    text     ---------|-----           shown  = characters of decode(window) that were given out

One limit: a tokenizer with byte fallback (SentencePiece) decodes a run of byte tokens as a whole, so an invalid
byte after valid ones would change text that was already given out. It is not taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
# A UTF-8 character has at most four bytes and a token at least one, so a character that four tokens could not
# complete never will be. The window is cut at twice that, to do it seldom.
MAX_PENDING = 4
MAX_WINDOW = 2 * MAX_PENDING


class Detokenizer:
    """`decode` turns a short list of ids into text, without special tokens.

    `visible[token]` is 0 for ids that never give text (special, or no token at all); ids past its end neither.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], visible: bytes) -> None:
        self._decode = decode
        self._visible = visible
        self._window: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that `token` settles; often its own, sometimes none, sometimes also that of earlier ones."""
        if token >= len(self._visible) or not self._visible[token]:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        settled = text.rstrip(UNFINISHED)
        piece = settled[self._shown :]
        self._shown = max(self._shown, len(settled))
        if len(self._window) >= MAX_WINDOW:
            piece += self._cut(text)
        return piece

    def flush(self) -> str:
        """What is still held back, at the end of the answer."""
        text = self._decode(self._window) if self._window else ""
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece

    def _cut(self, text: str) -> str:
        """Drops old tokens from the window; gives out what no later token can change any more.

        Only the last U+FFFD of `text` can still become a character, and its bytes lie in the tokens that stay.
        """
        held = 1 if text.endswith(UNFINISHED) else 0
        settled = len(text) - held
        piece = text[self._shown : settled]
        del self._window[:-MAX_PENDING]
        self._shown = len(self._decode(self._window)) - held
        return piece
