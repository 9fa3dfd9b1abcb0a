"""Bodies generated from the OpenAPI document: what it allows is served, what it forbids is refused, nothing breaks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from isthmus.live.gateway import GatewayTokenizer, create_app

from . import document_hooks  # noqa: F401, registers them
from .fake import CARD, FakeBackend, fitting

# No HTTP server refuses headers that it does not know.
CONFIG = SchemathesisConfig.from_dict({"generation": {"allow-extra-parameters": False}})
READING = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def document(tokenizer: GatewayTokenizer) -> Iterator[schemathesis.BaseSchema]:
    backend = FakeBackend(fitting)
    backend.card = msgspec.structs.replace(CARD, max_length=100_000)
    app = create_app(backend, tokenizer)
    return schemathesis.openapi.from_asgi("/openapi.json", app, config=CONFIG)


@pytest.mark.parametrize("path", READING)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_document_holds(document: schemathesis.BaseSchema, path: str, mode: GenerationMode) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=document[path]["POST"].as_strategy(generation_mode=mode))
    def holds(case: schemathesis.Case) -> None:
        # schemathesis takes one name of a discriminator for all that a variant has, and calls the others wrong.
        assume(mode.is_positive or not allowed.is_valid(case.body))
        case.call_and_validate()

    root = document.raw_schema
    body = root["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    allowed = Draft202012Validator(body | {"components": root["components"]})
    holds()


def test_all_that_reads_a_body_is_here(document: schemathesis.BaseSchema) -> None:
    posts = [path for path, methods in document.raw_schema["paths"].items() if "post" in methods]
    assert posts == READING
