from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from isthmus.live.gateway import GatewayTokenizer, create_app

from . import folder
from .fake import FakeBackend, says
from .inprocess import Poster
from .server import serving


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> GatewayTokenizer:
    return GatewayTokenizer.load(folder.write(tmp_path_factory.mktemp("model")))


@pytest.fixture
def backend() -> FakeBackend:
    """Says "hello" to everything, until a test changes its script."""
    return FakeBackend(lambda _: says([*folder.byte_tokens("hello"), folder.EOS]))


@pytest.fixture
def post(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Poster:
    """Sends one request to an app around `backend`, without a socket."""
    return Poster(create_app(backend, tokenizer))


class _Switch:
    """Stands before one server for the whole session; each test puts its own backend behind it."""

    def __init__(self) -> None:
        self.backend: FakeBackend | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.backend, name)


@pytest.fixture(scope="session")
def _switch() -> _Switch:
    switch = _Switch()
    switch.backend = FakeBackend(lambda _: says([folder.EOS]))
    return switch


@pytest.fixture(scope="session")
def _url(_switch: _Switch, tokenizer: GatewayTokenizer) -> Iterator[str]:
    with serving(create_app(_switch, tokenizer)) as url:
        yield url


@pytest.fixture
def url(_url: str, _switch: _Switch, backend: FakeBackend) -> str:
    """Base URL of a real server around `backend`."""
    _switch.backend = backend
    return _url


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
