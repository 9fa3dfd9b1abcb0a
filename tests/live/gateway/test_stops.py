from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.live.gateway.detokenizer import StopMatcher

# Two letters only, so that stop strings are met, nearly met, and met inside each other.
TEXT = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def cut_of(text: str, stops: list[str]) -> tuple[str, bool]:
    """The specification, in one line each: the stop complete first wins; of two, the longer."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(TEXT, STOPS, st.lists(st.integers(1, 5), max_size=40))
def test_any_chunking_gives_the_same_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown, start = "", 0
    for size in [*sizes, len(text)]:
        shown += matcher.push(text[start : start + size])
        start += size
    shown += matcher.flush()
    assert (shown, matcher.matched) == cut_of(text, stops)


@given(TEXT, STOPS)
def test_only_what_may_begin_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if not matcher.matched:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_across_pieces() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert [matcher.push(piece) for piece in ("Hi.\n", "\nUs", "er", ":x")] == ["Hi.", "", "", ""]
    assert matcher.matched
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_a_false_beginning_is_shown_after_all() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("a E", "N", "d", "E")] == ["a ", "", "ENd", ""]
    assert matcher.flush() == "E"


def test_without_stops_nothing_is_held() -> None:
    assert StopMatcher([]).push("text") == "text"
