"""Whatever strangers send, others are served and nothing dies. Each act is judged alone; `make soak` has longer ones.

The cluster is the same for all acts as long as they leave it well.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hostile import acts
from tests.hostile.acts import ANSWERED, LEAST, TURNED_AWAY
from tests.hostile.victim import DESCRIPTORS, GROWN_BYTES, MODEL, Victim, attacked, victim

SCHEMAS: list[dict[str, Any]] = [
    {"const": LEAST},
    {"enum": [0, LEAST]},
    {"type": "integer", "minimum": LEAST, "maximum": LEAST + 1},
    {"enum": [2**64, -(10**30), 10**400]},
    {"type": "integer", "exclusiveMinimum": LEAST - 1, "maximum": LEAST},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"const": LEAST}]}}},
]
NODE_HEADER = 16 * 2**20 - 1


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Victim]]:
    """The running cluster, or another one where the last act left none that is well."""
    with contextlib.ExitStack() as stack:
        found: list[Victim] = []

        def get() -> Victim:
            if not (found and found[-1].is_well):
                stack.close()
                found.append(stack.enter_context(victim(tmp_path_factory.mktemp("victim"))))
            return found[-1]

        yield get


@pytest.fixture
def target(running: Callable[[], Victim]) -> Victim:
    return running()


def more(*values: object) -> Any:
    """For `make soak` alone."""
    return pytest.param(*values, marks=pytest.mark.soak)


def test_schemas_with_numbers_at_and_beyond_the_ends_of_integers(target: Victim) -> None:
    """Refused, or followed; by each way in which a schema comes."""
    with attacked(target) as outcome:
        for schema in SCHEMAS:
            for path, body in acts.grammars(schema):
                outcome.add(target.post(path, body))
    assert set(outcome.heard) <= ANSWERED


def test_lines_of_128_mib(target: Victim) -> None:
    with attacked(target, peak_bytes=GROWN_BYTES) as outcome:
        for begin in acts.LONG:
            acts.long_line(target, outcome, begin, 128 << 20)
    assert set(outcome.heard) <= {"400", "414", "431", "closed"}


@pytest.mark.parametrize("count", [DESCRIPTORS + 50, more(1100)])
def test_more_half_headers_than_descriptors(count: int, target: Victim) -> None:
    with attacked(target) as outcome:
        acts.half_headers(target, outcome, count)
    assert outcome.heard[-1] == "200", "somebody who asks meanwhile"
    assert set(outcome.heard[:-1]) <= TURNED_AWAY


@pytest.mark.parametrize("count", [20, more(100)])
def test_bodies_without_their_last_byte(count: int, target: Victim) -> None:
    with attacked(target) as outcome:
        acts.cut_bodies(target, outcome, count, (8 << 20) - 1)
    assert set(outcome.heard) <= TURNED_AWAY


def test_large_schemas_at_once(target: Victim) -> None:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    bodies = [asked | {"guided_json": make(16, 4_800_000)} for make in (acts.doubling, acts.nested)]
    with attacked(target) as outcome:
        outcome.add(*target.post_all("/v1/completions", bodies * 2, at_once=4))
    assert set(outcome.heard) <= {"400", "413"}


@pytest.mark.parametrize("count", [4, more(60)])
def test_schemas_of_many_optional_properties(count: int, target: Victim) -> None:
    """One after the other: what is compiled of them does not stay."""
    bodies = [
        {"model": MODEL, "prompt": "x", "max_tokens": 2, "guided_json": acts.optional_integers(1700, seed)}
        for seed in range(count)
    ]
    with attacked(target) as outcome:
        outcome.add(*target.post_all("/v1/completions", bodies))
    assert set(outcome.heard) <= ANSWERED


def test_short_descriptions_of_large_machines(target: Victim) -> None:
    with attacked(target) as outcome:
        for bomb in acts.bombs():
            body = {"model": MODEL, "prompt": "x", "max_tokens": 4} | bomb
            outcome.add(target.post("/v1/completions", acts.encoded(body)))
    assert set(outcome.heard) <= ANSWERED


@pytest.mark.parametrize("count", [40, more(200)])
def test_streams_that_nobody_reads(count: int, target: Victim) -> None:
    with attacked(target):
        acts.unread(target, count)


def test_large_requests(target: Victim) -> None:
    functions = [{"name": f"f{at}", "parameters": {}} for at in range(50_000)]
    words = random.Random(1).choices(["isthmus ", "ab ", "\u00e9t\u00e9 ", "1234 "], k=1_400_000)
    said = {"role": "user", "content": "x"}
    bodies: list[dict[str, Any]] = [
        {"messages": [said], "tools": [{"type": "function", "function": each} for each in functions]},
        {"messages": [said] * 200_000},
        {"messages": [{"role": "user", "content": "".join(words)}]},
    ]
    with attacked(target) as outcome:
        for body in bodies:
            content = json.dumps({"model": MODEL, "max_tokens": 2} | body, ensure_ascii=False).encode()
            outcome.add(target.post("/v1/chat/completions", content))
    assert set(outcome.heard) <= {"400", "413"}


@pytest.mark.parametrize("count", [3, more(30)])
def test_messages_to_the_head_that_wait_for_one_that_never_comes(count: int, target: Victim) -> None:
    with attacked(target, peak_bytes=GROWN_BYTES) as outcome:
        acts.join_and(target, outcome, 10, acts.hello() + acts.messages_from_one_on(count, 4_700_000))
    assert set(outcome.heard) == {"closed"}


@pytest.mark.parametrize("count", [10, more(40)])
def test_long_headers_of_frames(count: int, target: Victim) -> None:
    with attacked(target, peak_bytes=GROWN_BYTES) as outcome:
        for begin in (acts.hello(), b""):
            acts.join_and(target, outcome, count, begin + acts.long_frame_header(NODE_HEADER))
    assert set(outcome.heard) == {"closed"}


@pytest.mark.parametrize("count", [DESCRIPTORS + 50, more(3000)])
def test_sessions_that_say_nothing_more(count: int, target: Victim) -> None:
    """Every second one greets, all of these alike. Closed, though they break no rule but time."""
    with attacked(target, peak_bytes=GROWN_BYTES) as outcome:
        acts.join_and(target, outcome, count, b"", acts.hello())
    assert set(outcome.heard) == {"closed"}


def test_what_is_no_greeting(target: Victim) -> None:
    """Noise, HTTP and TLS."""
    with attacked(target) as outcome:
        for sent in (
            random.Random(2).randbytes(1 << 20),
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
            bytes.fromhex("160301020001") + random.Random(3).randbytes(600),
        ):
            acts.join_and(target, outcome, 20, sent)
    assert set(outcome.heard) == {"closed"}
