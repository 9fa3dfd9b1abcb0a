from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from isthmus.live.gateway import GatewaySettings, GatewayTokenizer, create_app

from . import folder
from .fake import ROOMY, FakeBackend, says
from .inprocess import Poster, Served
from .server import serving


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> GatewayTokenizer:
    return GatewayTokenizer.load(folder.write(tmp_path_factory.mktemp("model")))


@pytest.fixture
def backend() -> FakeBackend:
    """Says "hello" to everything, until a test changes its script."""
    return FakeBackend(lambda _: says([*folder.byte_tokens("hello"), folder.EOS]))


@pytest.fixture
def post(served: Served) -> Poster:
    """Sends one request to an app around `backend`, without a socket."""
    return served()


@pytest.fixture
def served(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Served:
    """Makes an app around `backend` with these settings."""
    return lambda **settings: Poster(create_app(backend, tokenizer, GatewaySettings(**settings)))


class _Switch:
    """Stands before one server for the whole session, with room for prompts with tools; each test puts its own
    backend behind it."""

    card = ROOMY
    backend: FakeBackend

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)


@pytest.fixture(scope="session")
def _served(tokenizer: GatewayTokenizer) -> Iterator[tuple[_Switch, str, OpenAI]]:
    switch = _Switch()
    with (
        serving(create_app(switch, tokenizer)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield switch, url, client


@pytest.fixture
def url(_served: tuple[_Switch, str, OpenAI], backend: FakeBackend) -> str:
    """Base URL of a real server around `backend`."""
    switch, url, _ = _served
    switch.backend = backend
    return url


@pytest.fixture
def client(url: str, _served: tuple[_Switch, str, OpenAI]) -> OpenAI:
    return _served[2]
