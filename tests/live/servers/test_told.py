"""What servers say of themselves: pages as vLLM 0.32, SGLang, llama.cpp, Ollama and llama-cpp-python write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from isthmus.live.servers.told import (
    MAX_TOKENS,
    METRICS,
    PAGES,
    Description,
    EventSource,
    read_models,
    read_pages,
)

VLLM = {
    "id": "m",
    "object": "model",
    "created": 1,
    "owned_by": "vllm",
    "root": "/m",
    "parent": None,
    "max_model_len": 4096,
}
VLLM_METRICS = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="364"} 1.0\n'
)
SGLANG = {
    "id": "q",
    "object": "model",
    "owned_by": "sglang",
    "root": "q",
    "parent": None,
    "max_model_len": 32768,
}
LLAMA = {
    "id": "smol", "aliases": ["smol", "small"], "object": "model", "owned_by": "llamacpp",
    "meta": {"n_ctx": 2048, "n_ctx_train": 8192},
}  # fmt: skip
OLLAMA = {"id": "llama3.2:latest", "object": "model", "created": 1, "owned_by": "library"}


def read(models: list[dict[str, Any]], **pages: Any) -> Description:
    told = read_models(json.dumps({"object": "list", "data": models}).encode())
    host = pages.pop("host", "")
    found = {f"/{path.replace('__', '/')}": page for path, page in pages.items()}
    assert set(found) <= {*PAGES[told.kind]}, "a page that a server of this kind is not asked for"
    texts = {path: page if isinstance(page, str) else json.dumps(page) for path, page in found.items()}
    return read_pages(told, {path: text.encode() for path, text in texts.items()}, host)


def test_vllm() -> None:
    lora = VLLM | {"id": "sql", "root": "/lora", "parent": "m", "max_model_len": None}
    told = read([VLLM, lora], metrics=VLLM_METRICS, version={"version": "0.32.0"})
    assert told.names == ("m", "sql")
    assert (told.kind, told.version, told.longest) == ("vllm", "0.32.0", 4096)
    assert (told.kv_tokens, told.block_tokens) == (364 * 128, 128)


@pytest.mark.parametrize("owner", ["vllm", "somebody"])
def test_vllm_s_start_and_events(owner: str) -> None:
    """Its ports count, not its words for its host."""
    model = VLLM | {"owned_by": owner}
    metrics = VLLM_METRICS + "process_start_time_seconds 1.79510231405e+09\n"
    source = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://x:5558", "topic": "kv"}
    told = read([model], metrics=metrics, kv_event_sources={"0": source}, host="10.0.0.1")
    assert told.started_s == 1795102314.05
    assert told.events == EventSource("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", "kv")
    told = read([model], metrics=metrics, kv_event_sources={"0": source}, host="::1")
    assert told.events is not None and told.events.endpoint == "tcp://[::1]:5557"
    for odd in ({}, {"0": source, "1": source}, {"0": source | {"publisher": "null"}}, {"0": 1}):
        assert read([model], metrics=metrics, kv_event_sources=odd, host="10.0.0.1").events is None
    for endpoint in ("ipc:///tmp/kv", "tcp://*:0", "tcp://*:70000", "tcp://*:x"):
        sources = {"0": source | {"endpoint": endpoint}}
        assert read([model], metrics=metrics, kv_event_sources=sources, host="10.0.0.1").events is None


@pytest.mark.parametrize("labels", ["", '{engine_type="unified",model_name="q",tp_rank="0"}'])
def test_sglang_with_metrics(labels: str) -> None:
    metrics = f"sglang:max_total_num_tokens{labels} 471258.0\nsglang:page_size{labels} 64.0\n"
    told = read([SGLANG], metrics=metrics, get_server_info={"version": "0.5.6"})
    assert (told.kind, told.version, told.longest) == ("sglang", "0.5.6", 32768)
    assert (told.kv_tokens, told.block_tokens) == (471258, 64)


def test_sglang_without_metrics() -> None:
    told = read([SGLANG], get_server_info={"version": "0.5.6", "max_total_num_tokens": 4096, "page_size": 1})
    assert (told.kv_tokens, told.block_tokens) == (4096, 1)


def test_llama_cpp() -> None:
    props = {"default_generation_settings": {"n_ctx": 2048}, "total_slots": 4, "build_info": "b11434-abc"}
    told = read([LLAMA], props=props)
    assert told.names == ("smol", "small"), "requests may ask for any of its names"
    assert (told.kind, told.version, told.longest, told.kv_tokens) == ("llama.cpp", "b11434-abc", 2048, 8192)
    assert read([LLAMA]).longest == 2048, "without `/props`"


def test_ollama() -> None:
    told = read([OLLAMA], api__version={"version": "0.9.1"})
    assert (told.kind, told.version, told.kv_tokens, told.longest) == ("ollama", "0.9.1", 0, 0)


def test_llama_cpp_python_says_nothing() -> None:
    told = read([{"id": "/m.gguf", "object": "model", "owned_by": "me", "permissions": []}])
    assert (told.names, told.kind, told.kv_tokens, told.longest) == (("/m.gguf",), "", 0, 0)


@pytest.mark.parametrize(
    ("metrics", "kind"), [(VLLM_METRICS, "vllm"), ("sglang:num_running_reqs 0\n", "sglang"), ("a 1\n", "")]
)
def test_metrics_tell_the_kind_of_a_server_behind_another_name(metrics: str, kind: str) -> None:
    assert read([{"id": "m", "owned_by": "somebody"}], metrics=metrics).kind == kind


@pytest.mark.parametrize(
    "page", [b"", b"[]", b"{", b'{"data": 1}', b'{"data": [{"id": 1}]}', b'{"data": [1]}', b"[" * 10**5]
)
def test_what_is_no_list_of_models_is_an_error(page: bytes) -> None:
    with pytest.raises(ValueError):
        read_models(page)


@pytest.mark.parametrize(
    "odd", ["-1", "nan", "inf", "1e300", "", "x", str(MAX_TOKENS + 1), None, [], {"a": 1}, True]
)
def test_odd_numbers_count_as_untold(odd: Any) -> None:
    told = read(
        [VLLM | {"max_model_len": odd}],
        metrics=f'vllm:cache_config_info{{block_size="{odd}",num_gpu_blocks="{odd}"}} 1\n',
    )
    assert told.longest in (0, 1) and told.kv_tokens in (0, 1)
    told = read([SGLANG], get_server_info={"max_total_num_tokens": odd, "page_size": odd, "version": odd})
    assert told.kv_tokens in (0, 1) and told.block_tokens in (0, 1)
    told = read(
        [LLAMA | {"meta": odd, "aliases": odd}], props={"default_generation_settings": odd, "total_slots": odd}
    )
    assert told.kv_tokens == 0 and told.names[0] == "smol"


@pytest.mark.parametrize("page", [b"{", b"[]", b"null", b"\xff", b'{"a":' * 10**5])
def test_pages_of_another_form_add_nothing(page: bytes) -> None:
    for kind, names in PAGES.items():
        bare = Description((), kind=kind)
        assert read_pages(bare, dict.fromkeys(names, page)) == bare
    assert read_pages(Description(()), {METRICS: page}).kind == ""
