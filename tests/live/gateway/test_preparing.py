"""Bodies that become prepared requests in a process that may die, and others here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
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
from .fake import FakeBackend

CARD = ModelCard("acme/tiny", 1500, 300, 0)
SETTINGS = GatewaySettings(keys=(ApiKey("ann", b"k" * 32),), long_body_bytes=2000, prepare_s=0.5)
TERMS = RequestTerms(priority=3, ttft_ms=100, tenant="ann")
MESSAGES = [{"role": "user", "content": "hi"}]
CRASH = breaking()


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
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
GRAMMAR = {"messages": MESSAGES, "response_format": SCHEMA}
LARGE = {"minimum": -(2**63) - 1, "a": 10**40}


def tool(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def in_responses(schema: Any) -> dict[str, Any]:
    return {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}


SAME = [
    ("chat", {"messages": MESSAGES, "stop": ["a"], "stream": True} | LONG),
    ("chat", GRAMMAR | {"n": 3}),
    ("chat", tool()),
    ("chat", tool(parameters={"type": "object"}) | {"tool_choice": "required"}),
    ("chat", tool(parameters=LARGE)),
    ("completion", {"prompt": ["a", "bc"], "n": 2, "echo": True, "logprobs": 1} | LONG),
    (
        "response",
        {"input": "hi", "instructions": "be kind", "max_output_tokens": 7, "tools": [{"type": "mcp"}]} | LONG,
    ),
    ("response", in_responses({})),
    ("tokenize", {"prompt": "x" * 2500, "return_token_strs": True}),
    ("detokenize", {"tokens": [97] * 1000}),
]


@pytest.mark.parametrize(("name", "body"), SAME)
def test_a_worker_prepares_as_this_process_does(
    name: str, body: dict[str, Any], here: Preparing, apart: Preparing
) -> None:
    seeded = body if "tokenize" in name else body | {"seed": 5}
    expected = prepared(here, name, seeded)
    with unable_here(apart):
        found = prepared(apart, name, seeded)
    if not isinstance(expected, bytes):
        expected = replace(expected, created_s=found.created_s)
    assert found == expected


REFUSED = [
    ("chat", {"messages": "x"} | LONG),
    ("chat", {"messages": MESSAGES, "model": "other"} | LONG),
    ("chat", {"messages": MESSAGES * 300}),
    ("completion", {"prompt": "x", "guided_regex": "("}),
    ("completion", b"{" + b" " * 3000),
    ("response", {"input": "x" * 3000}),
    ("response", in_responses({"type": "no such type"})),
    ("detokenize", {"tokens": [300] * 1000}),
]


@pytest.mark.parametrize(("name", "body"), REFUSED)
def test_a_worker_refuses_as_this_process_does(name: str, body: Any, here: Preparing, apart: Preparing) -> None:
    errors = [refused(preparing, name, body) for preparing in (here, apart)]
    assert len({(str(error), error.param, error.code, error.http_status) for error in errors}) == 1


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        (
            "completion",
            {"prompt": "x", "guided_grammar": f"start: %json {json.dumps(CRASH)}"},
            "guided_grammar",
        ),
        ("response", in_responses(CRASH), "text.format.schema"),
        (
            "chat",
            tool(parameters={"type": "object", "properties": {"a": CRASH}}) | {"tool_choice": "required"},
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_grammar_that_breaks_its_library_is_refused_by_name(
    apart: Preparing, name: str, body: dict[str, Any], param: str
) -> None:
    deaths = apart.num_deaths
    error = refused(apart, name, body)
    assert (error.param, error.http_status, apart.num_deaths) == (param, 400, deaths + 1)
    assert str(error).startswith(f"'{param}' cannot be followed: ") and "the library of grammars fails" in str(
        error
    )
    assert prepared(apart, "chat", GRAMMAR).jobs
    metrics = Meter(FakeBackend(lambda _: ()), apart, Traffic(SETTINGS.http)).render().decode()
    assert f"isthmus_preparing_deaths_total {deaths + 1}.0" in metrics
    assert "isthmus_requests_preparing 0.0" in metrics


def test_what_takes_too_long_is_refused(with_settings: WithSettings) -> None:
    error = refused(with_settings(prepare_s=0.05), "chat", {"messages": MESSAGES * 100_000})
    assert "limits.prepare_s" in str(error) and error.param is None


WithSettings = Callable[..., Preparing]


@pytest.fixture
def with_settings(model: Path) -> Iterator[WithSettings]:
    """Makes workers with other settings."""
    with contextlib.ExitStack() as stack:

        def make(**changes: Any) -> Preparing:
            made = Preparing(CARD, GatewayTokenizer.load(model), replace(SETTINGS, **changes), model)
            stack.callback(made.close)
            return made

        yield make


def gathered(preparing: Preparing, name: str, body: dict[str, Any]) -> list[Any]:
    """Four times the same, all at once."""
    content = json.dumps(body).encode()

    async def ask_all() -> list[Any]:
        asked = [preparing(name, content, str(number), TERMS, stays) for number in range(4)]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(ask_all())


def test_so_many_are_read_at_once_and_no_more(with_settings: WithSettings) -> None:
    few = with_settings(max_preparing=2)
    refusals = [each for each in gathered(few, "chat", GRAMMAR) if isinstance(each, OverloadedError)]
    assert len(refusals) == 2 and refusals[0].retry_after_s == 1 and "limits.preparing" in str(refusals[0])
    assert few.num_waiting == 0


def test_who_goes_away_takes_nobodys_place(
    with_settings: WithSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client costs a worker's time only if it waits for it, or the work has begun."""
    single = with_settings(num_preparers=1)
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
    assert begun in (["there"], ["gone 0", "there"])


def test_bodies_that_wait_have_a_limit_in_bytes(with_settings: WithSettings) -> None:
    body = {"prompt": "a " * 2_000}
    small = with_settings(http=HttpLimits(bodies=2 * len(json.dumps(body))))
    found = gathered(small, "tokenize", body)
    assert [type(each) for each in found] == [bytes, bytes, OverloadedError, OverloadedError]
    assert "limits.bodies" in str(found[-1])
    assert prepared(small, "tokenize", body), "they make room again"


def test_small_bodies_are_prepared_here_and_workers_know_no_keys(apart: Preparing) -> None:
    with unable_here(apart), pytest.raises(AssertionError, match="not here"):
        prepared(apart, "chat", {"messages": MESSAGES})
    assert apart.setup.settings.keys == ()


@contextlib.contextmanager
def unable_here(preparing: Preparing) -> Iterator[None]:
    """Inside, this process prepares nothing."""

    def fail(*_: Any) -> Any:
        raise AssertionError("not here")

    before = preparing._preparations
    preparing._preparations = {name: Preparation(each.read, fail) for name, each in before.items()}
    yield
    preparing._preparations = before
