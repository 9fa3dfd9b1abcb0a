"""Bodies that become prepared requests in a process that may die, and others here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import OverloadedError, RequestError
from isthmus.core.types import ModelCard
from isthmus.live.gateway import GatewaySettings, GatewayTokenizer
from isthmus.live.gateway.headers import RequestTerms
from isthmus.live.gateway.http import ClientGoneError
from isthmus.live.gateway.metrics import Meter
from isthmus.live.gateway.preparing import Preparation, Preparing
from isthmus.live.gateway.settings import ApiKey, HttpLimits
from isthmus.live.gateway.tenants import Traffic
from tests.schemas import breaking

from . import folder
from .fake import FakeBackend, says

CARD = ModelCard("acme/tiny", 1500, 300, 0)
SETTINGS = GatewaySettings(keys=(ApiKey("ann", b"k" * 32),), long_body_bytes=2000, prepare_s=0.5)
TERMS = RequestTerms(priority=3, ttft_ms=100, tenant="ann")
MESSAGES = [{"role": "user", "content": "hi"}]
CRASH = breaking()
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": CRASH}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def here(model: Path) -> Preparing:
    return Preparing(CARD, GatewayTokenizer.load(model), SETTINGS)


@pytest.fixture(scope="module")
def apart(model: Path) -> Iterator[Preparing]:
    made = Preparing(CARD, GatewayTokenizer.load(model), SETTINGS, model)
    yield made
    made.close()


def prepared(preparing: Preparing, name: str, body: dict[str, Any] | bytes) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(preparing(name, data, "0123", TERMS, stays))


async def stays() -> Any:
    """Of a client that does not go away."""
    await asyncio.Event().wait()


def refused(preparing: Preparing, name: str, body: dict[str, Any] | bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepared(preparing, name, body)
    return caught.value


LONG = {"metadata": {"note": "x" * 3000}}
GRAMMAR = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
}
SAME = {
    "a long chat": ("chat", {"messages": MESSAGES, "seed": 5, "stop": ["a"], "stream": True} | LONG),
    "with a grammar": ("chat", {"messages": MESSAGES, "seed": 5, "n": 3} | GRAMMAR),
    "with tools": (
        "chat",
        {"messages": MESSAGES, "seed": 5, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    "a forced call": (
        "chat",
        {
            "messages": MESSAGES,
            "seed": 5,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "required",
        },
    ),
    "integers of any length": (
        "chat",
        {
            "messages": MESSAGES,
            "seed": 5,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"minimum": -(2**63) - 1, "a": 10**40}},
                }
            ],
        },
    ),
    "completions": (
        "completion",
        {"prompt": ["a", "bc"], "n": 2, "seed": 5, "echo": True, "logprobs": 1} | LONG,
    ),
    "a response": (
        "response",
        {
            "input": "hi",
            "instructions": "be kind",
            "seed": 5,
            "max_output_tokens": 7,
            "tools": [{"type": "mcp"}],
        }
        | LONG,
    ),
    "a response with a schema": (
        "response",
        {"input": "hi", "seed": 5, "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
    ),
    "tokens": ("tokenize", {"prompt": "x" * 2500, "return_token_strs": True}),
    "text": ("detokenize", {"tokens": [97] * 1000}),
}


@pytest.mark.parametrize("name", SAME)
def test_a_worker_prepares_as_this_process_does(name: str, here: Preparing, apart: Preparing) -> None:
    endpoint, body = SAME[name]
    expected = prepared(here, endpoint, body)
    with unable_here(apart):
        found = prepared(apart, endpoint, body)
    if not isinstance(expected, bytes):
        expected = replace(expected, created_s=found.created_s)
    assert found == expected


REFUSED = {
    "chat": [{"messages": "x"} | LONG, {"messages": MESSAGES, "model": "other"} | LONG, {"messages": MESSAGES * 300}],
    "completion": [{"prompt": "x" * 3000}, {"prompt": "x", "guided_regex": "("}, b"{" + b" " * 3000],
    "response": [{"input": "x" * 3000}, {"input": "x", "text": {"format": {"type": "json_schema", "name": "a",
                 "schema": {"type": "no such type"}}}}],
    "detokenize": [{"tokens": [300] * 1000}],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_worker_refuses_as_this_process_does(name: str, here: Preparing, apart: Preparing) -> None:
    for body in REFUSED[name]:
        expected, found = refused(here, name, body), refused(apart, name, body)
        assert (str(found), found.param, found.code, found.http_status) == (
            str(expected), expected.param, expected.code, expected.http_status,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        (
            "chat",
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": {"schema": CRASH}},
            },
            "response_format.json_schema.schema",
        ),
        ("chat", {"messages": MESSAGES, "guided_json": {"items": False} | CRASH}, "guided_json"),
        ("completion", {"prompt": "x", "structured_outputs": {"json": CRASH}}, "structured_outputs.json"),
        (
            "completion",
            {"prompt": "x", "guided_grammar": f"start: %json {json.dumps(CRASH)}"},
            "guided_grammar",
        ),
        (
            "response",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": CRASH}}},
            "text.format.schema",
        ),
        (
            "chat",
            {
                "messages": MESSAGES,
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_grammar_that_breaks_its_library_is_refused_by_name(
    apart: Preparing, name: str, body: dict[str, Any], param: str
) -> None:
    deaths = apart.num_deaths
    error = refused(apart, name, body)
    assert error.param == param and error.http_status == 400
    assert f"'{param}' cannot be followed: " in str(error) and "the library of grammars fails on it" in str(
        error
    )
    assert apart.num_deaths == deaths + 1
    assert prepared(apart, "chat", {"messages": MESSAGES} | GRAMMAR).jobs


def test_what_takes_too_long_is_refused(apart: Preparing) -> None:
    """More messages than half a second is enough for."""
    settings = replace(SETTINGS, prepare_s=0.05)
    hasty = replace_settings(apart, settings)
    error = refused(hasty, "chat", {"messages": MESSAGES * 100_000})
    assert "limits.prepare_s" in str(error) and error.param is None
    hasty.close()


def replace_settings(preparing: Preparing, settings: GatewaySettings) -> Preparing:
    model = Path(preparing.setup.model)
    return Preparing(CARD, GatewayTokenizer.load(model), settings, model)


def test_so_many_are_read_at_once_and_no_more(apart: Preparing) -> None:
    few = replace_settings(apart, replace(SETTINGS, max_preparing=2))
    body = json.dumps({"messages": MESSAGES} | GRAMMAR).encode()

    async def ask_all() -> list[Any]:
        return await asyncio.gather(
            *[few("chat", body, str(number), TERMS, stays) for number in range(4)], return_exceptions=True
        )

    found = asyncio.run(ask_all())
    few.close()
    refusals = [each for each in found if isinstance(each, OverloadedError)]
    assert len(refusals) == 2 and refusals[0].retry_after_s == 1 and "limits.preparing" in str(refusals[0])
    assert few.num_waiting == 0


def test_who_goes_away_takes_nobodys_place(apart: Preparing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client costs a worker's time only if it waits for it, or the work has begun."""
    single = replace_settings(apart, replace(SETTINGS, num_preparers=1))
    long, short = (json.dumps({"prompt": "a " * count}).encode() for count in (50_000, 2_000))
    begun, prepare = list[str](), Preparing._prepare

    def watched(preparing: Preparing, name: str, body: bytes, hex_id: str, terms: RequestTerms) -> Any:
        begun.append(hex_id)
        return prepare(preparing, name, body, hex_id, terms)

    async def leaves() -> Any:
        return {"type": "http.disconnect"}

    async def ask_all() -> None:
        gone = [single("tokenize", long, f"gone {number}", TERMS, leaves) for number in range(20)]
        for error in await asyncio.gather(*gone, return_exceptions=True):
            assert isinstance(error, ClientGoneError)
        assert single.num_waiting == 0
        await single("tokenize", short, "there", TERMS, stays)

    monkeypatch.setattr(Preparing, "_prepare", watched)
    asyncio.run(ask_all())
    single.close()
    assert begun in (["there"], ["gone 0", "there"])


def test_bodies_that_wait_have_a_limit_in_bytes(apart: Preparing) -> None:
    body = json.dumps({"prompt": "a " * 2_000}).encode()
    small = replace_settings(apart, replace(SETTINGS, http=HttpLimits(bodies=2 * len(body))))

    async def ask_all() -> list[Any]:
        asked = [small("tokenize", body, str(number), TERMS, stays) for number in range(4)]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(ask_all())
    assert [type(each) for each in found] == [bytes, bytes, OverloadedError, OverloadedError]
    assert "limits.bodies" in str(found[-1])
    assert prepared(small, "tokenize", body), "they make room again"
    small.close()


def test_small_bodies_are_prepared_here(apart: Preparing) -> None:
    with unable_here(apart), pytest.raises(AssertionError, match="not here"):
        prepared(apart, "chat", {"messages": MESSAGES})


def test_workers_know_no_keys(apart: Preparing) -> None:
    assert apart.setup.settings.keys == ()


class unable_here:
    """Inside, this process prepares nothing."""

    def __init__(self, preparing: Preparing) -> None:
        self._preparing = preparing

    def __enter__(self) -> None:
        def fail(*_: Any) -> Any:
            raise AssertionError("not here")

        self._before = self._preparing._preparations
        self._preparing._preparations = {
            name: Preparation(each.read, fail) for name, each in self._before.items()
        }

    def __exit__(self, *_: object) -> None:
        self._preparing._preparations = self._before


def test_metrics_count_workers_that_died(model: Path) -> None:
    preparing = Preparing(CARD, GatewayTokenizer.load(model), SETTINGS, model)
    crash = {"type": "json_schema", "json_schema": {"name": "a", "schema": CRASH}}
    refused(preparing, "chat", {"messages": MESSAGES, "response_format": crash})
    metrics = (
        Meter(FakeBackend(lambda _: says([folder.EOS])), preparing, Traffic(SETTINGS.http)).render().decode()
    )
    assert "isthmus_preparing_deaths_total 1.0" in metrics and "isthmus_requests_preparing 0.0" in metrics
    preparing.close()
