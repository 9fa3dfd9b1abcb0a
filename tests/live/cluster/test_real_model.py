"""The default model, which people trained: a cluster answers with the tokens that transformers finds likeliest with the
same weights, widened from 4 bits to float32."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

from benchmarks.models import gguf_reference
from isthmus.cli.models import find_model
from isthmus.live.gateway.tokenizer import GatewayTokenizer
from tests.inside import inside
from tests.served import Client

NUM_TOKENS = 16
LONG = 500
"""Tokens of a document that are spread over nodes, none of which has memory for them."""
TEXTS = [
    "What is the capital of France?",
    "Übersetze ins Englische: Der Zug fährt um acht Uhr ab.",
    "How do 1, 1, 2, 3, 5, 8, 13 go on?",
    "Summarise: a cache keeps what was computed once, so that it need not be computed again. " * 8,
]


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Five, the last as long as a document."""
    tokenizer = GatewayTokenizer.load(find_model(None)[0])
    licence = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf8")
    found = [tokenizer.encode_chat(asked(text)) for text in TEXTS]
    found.append(tokenizer.encode_text(licence)[:LONG])
    assert len(found[-1]) == LONG
    return found


@cache
def reference() -> Any:
    return gguf_reference(find_model(None)[0], "sdpa")


def check(prompts: list[list[int]], answers: list[list[int]]) -> None:
    """The likeliest tokens by transformers."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert likeliest(tuple(prompt), tuple(answer[:-1])) == answer


@cache
def likeliest(prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
    """After the prompt and each token of the answer."""
    with torch.inference_mode():
        [logits] = reference()(torch.tensor([[*prompt, *answer]]), logits_to_keep=NUM_TOKENS).logits
    return logits.argmax(-1).tolist()


def test_its_greedy_tokens_are_those_of_transformers(prompts: list[list[int]]) -> None:
    """All at once, handed over from a prefill to a decode node. And made to call a tool, it calls, streamed or not."""
    with inside({"engine": {"dtype": "float32", "kv_memory": "256MiB"}}) as served:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda ids: served.tokens(ids, NUM_TOKENS, ignore_eos=True), prompts))
        body = {"model": served.model, "messages": asked(TEXTS[0]), "temperature": 0}
        reply = served.http.post("/v1/chat/completions", json=body).json()
        check_calls(served)
    assert reply["choices"][0]["message"]["content"] == "The capital of France is Paris."
    check(prompts, answers)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}


def check_calls(served: Client) -> None:
    """With OpenAI's client; the conversation goes on with what came, and the result of it."""
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    question = asked("What is the weather like in Paris?")
    fields: Any = {"model": served.model, "tools": [WEATHER], "temperature": 0, "max_tokens": 128}
    forced: Any = {"messages": question, "parallel_tool_calls": False, "tool_choice": "required", **fields}
    whole = client.chat.completions.create(**forced)
    with client.chat.completions.stream(**forced) as stream:
        in_pieces = stream.get_final_completion()
    call, same = (each.choices[0].message.tool_calls[0] for each in (whole, in_pieces))
    assert [each.choices[0].finish_reason for each in (whole, in_pieces)] == ["tool_calls"] * 2
    assert call.function.name == same.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments == json.loads(same.function.arguments)
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit")
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"}
    messages: Any = [*question, whole.choices[0].message, result]
    after = client.chat.completions.create(messages=messages, **fields | {"max_tokens": 16})
    assert after.choices[0].message.content


def test_its_tokens_with_kv_on_three_nodes(prompts: list[list[int]]) -> None:
    """The document is longer than the memory of the node that computes; attention nodes have every prompt, by its three
    KV heads."""
    roles = {"prefill": 0, "decode": 0, "mixed": 1, "attention": {"count": 3, "kv_memory": "14MiB"}}
    engine = {"dtype": "float32", "kv_memory": "11MiB", "max_sequences": 4}
    with inside({"roles": roles, "engine": engine, "cache": {"dram": 0}}) as served:
        asked = [prompts[0], prompts[-1]]
        answers = [served.tokens(ids, NUM_TOKENS, ignore_eos=True) for ids in asked]
        served.wait_until(lambda: served.total("attention_answered_total") > 0, "answers")
    check(asked, answers)
