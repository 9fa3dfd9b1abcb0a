"""Token ids to text, one token at a time.

The pieces joined are exactly `decode(prompt + answer)` without `decode(prompt)`: each token is decoded together with
the tokens just before it (at first the last of the prompt), and its text is the difference. So a decoder that strips
the first space of a text (SentencePiece) strips the prompt's. Text that ends in U+FFFD is held back, because the next
token may complete the character; a character that begins in the prompt belongs to the answer.

    tokens   t0 t1 t2 | t3 t4 | t5     window = t3 t4 t5: the last settled piece, then unsettled tokens
    text     ---------|-------|        shown  = characters of decode(window) that were given out

One limit: a tokenizer with byte fallback (SentencePiece) decodes a run of byte tokens as a whole, so an invalid
byte (or a real U+FFFD) among them would change text that was already given out. That text stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopMatcher:
    """Holds text back while it may be the beginning of a stop string. `stops`: non-empty strings; `shown`: the stop
    string is part of the answer."""

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._shown = shown
        self.matched = False

    def push(self, text: str) -> str:
        """The text that can be shown now; none after a match."""
        if not self._stops:
            return text
        if self.matched or not text:
            return ""
        buffer = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            end, start = min(found)  # the stop complete first; of two that end together, the longer
            self.matched, self._held = True, ""
            return buffer[: end if self._shown else start]
        begin = max(0, len(buffer) - self._longest + 1)
        while begin < len(buffer) and not any(stop.startswith(buffer[begin:]) for stop in self._stops):
            begin += 1
        self._held = buffer[begin:]
        return buffer[:begin]

    def flush(self) -> str:
        """The held text, at the end of the answer: it was no stop string."""
        held, self._held = self._held, ""
        return held


UNFINISHED = "\ufffd"
# A UTF-8 character has at most four bytes, so four tokens that do not complete one never will.
MAX_PENDING = 4
# Cutting the window costs one more decode.
MAX_WINDOW = 8


class Detokenizer:
    """`decode` turns a short list of ids into text.

    `visible[token]` is 0 for ids that never give text (special tokens, no token at all), as are ids past its end.
    `before`: the last visible tokens of the prompt, starting at a character boundary; `open`: they end inside a
    character.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        visible: bytes,
        before: Sequence[int] = (),
        *,
        open: bool = False,
    ) -> None:
        self._decode = decode
        self._visible = visible
        self._window: list[int] = []
        self._shown = 0
        self._settled = 0  # tokens of the window up to the last point where nothing was held back
        if open:
            for token in before:
                self.push(token)
        elif before:  # U+FFFD at their end is text
            self._window = list(before)
            self._shown, self._settled = len(decode(self._window)), len(before)

    def push(self, token: int) -> str:
        """The text that `token` settles: often its own, sometimes none, sometimes also that of earlier tokens."""
        if token >= len(self._visible) or not self._visible[token]:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(UNFINISHED)
        piece = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(certain) == len(text):
            self._settle()
        elif len(self._window) - self._settled > MAX_PENDING:
            piece += self._give_up(text)
        return piece

    def flush(self) -> str:
        """The held text, at the end of the answer."""
        text = self._decode(self._window) if self._window else ""
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece

    def _settle(self) -> None:
        """Marks the window as shown; drops old tokens, but only whole settled pieces."""
        if len(self._window) >= MAX_WINDOW:
            del self._window[: self._settled]
            self._shown = len(self._decode(self._window))
        self._settled = len(self._window)

    def _give_up(self, text: str) -> str:
        """Invalid UTF-8: shows everything that no later token can complete.

        That is all but the last U+FFFD of `text`, whose bytes lie in the tokens that stay.
        """
        piece = text[self._shown : -1]
        del self._window[:-MAX_PENDING]
        self._shown = len(self._decode(self._window)) - 1
        self._settled = len(self._window)
        return piece
