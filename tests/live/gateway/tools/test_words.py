"""Conversations in plain messages."""

from __future__ import annotations

import time

from isthmus.live.gateway.contents import in_words


def test_results_in_a_row_are_one_message() -> None:
    user, results = {"role": "user", "content": "?"}, [{"role": "tool", "content": str(k)} for k in range(3)]
    first, last = "<tool_response>\n0\n</tool_response>", "<tool_response>\n2\n</tool_response>"
    written = in_words([*results[:2], user, results[2]], None)
    assert [message["role"] for message in written] == ["user", "user", "user"]
    assert written[0]["content"] == f"{first}\n{first.replace('0', '1')}"
    assert written[1:] == [user, {"role": "user", "content": last}]


def test_the_time_grows_with_the_results() -> None:
    results = [{"role": "tool", "content": "x" * 1_000}] * 40_000
    started = time.process_time()
    [message] = in_words(results, None)
    # A tenth of a second. With the square of their number it would be minutes.
    assert time.process_time() - started < 10
    assert len(message["content"]) > 40_000_000
