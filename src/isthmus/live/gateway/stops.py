"""Stop strings, found across the borders of text pieces.

The answer is cut before the stop string that is complete first; of two complete at the same character, before
the longer. That depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds text back while it may be the beginning of a stop string. `stops`: non-empty strings. `shown`: the answer
    ends behind the stop string, not before it."""

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        # Longest first, so that the first found at a character is the one that starts earliest.
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self._shown = shown
        self.matched = False

    def push(self, text: str) -> str:
        """The text that can be shown now. After a match nothing more is shown."""
        if not self._automata:
            return text
        if self.matched or not text:
            return ""
        buffer = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            for automaton in self._automata:
                automaton.step(char)
            complete = next((a for a in self._automata if a.complete), None)
            if complete is not None:
                self.matched = True
                self._held = ""
                return buffer[: position if self._shown else position - len(complete.stop)]
        keep = max(automaton.length for automaton in self._automata)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What is held back, at the end of the answer: it was no stop string after all."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Knuth-Morris-Pratt: `length` characters of `stop` are the end of the text read so far."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = _borders(stop)

    @property
    def complete(self) -> bool:
        return self.length == len(self.stop)

    def step(self, char: str) -> None:
        """Reads one character. Must not be called once complete."""
        while self.length and self.stop[self.length] != char:
            self.length = self._fallback[self.length - 1]
        if self.stop[self.length] == char:
            self.length += 1


def _borders(word: str) -> list[int]:
    """For each prefix of `word`: length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[length] != word[i]:
            length = borders[length - 1]
        if word[length] == word[i]:
            length += 1
        borders[i] = length
    return borders
