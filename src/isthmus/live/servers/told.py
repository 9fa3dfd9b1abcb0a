"""What servers say of themselves, each kind in its own words. Reads pages; asks nobody.

The kind is what `/v1/models` says its models are owned by: vLLM, SGLang, llama.cpp, Ollama (`library`) and this project
put their own names there. Pages beyond that one are asked of a kind that has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

MODELS, METRICS, SOURCES = "/v1/models", "/metrics", "/kv_event_sources"
KINDS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "library": "ollama", "isthmus": "isthmus"}
PAGES: dict[str, tuple[str, ...]] = {
    "vllm": (METRICS, "/version", SOURCES),
    "sglang": (METRICS, "/get_server_info"),
    "llama.cpp": ("/props",),
    "ollama": ("/api/version", "/api/ps"),
    "isthmus": (),
    "": (METRICS, SOURCES),
}
"""Pages that a server of a kind is asked for beside `/v1/models`; one that it does not have tells nothing."""
LIFE = {"sglang": "/get_model_info"}
"""Asked for a sign of life, else `/health`: SGLang's `/health` computes a token, and waits for it behind prompts."""
_VLLM_MEMORY = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_SGLANG = re.compile(r"^sglang:(max_total_num_tokens|page_size)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_STARTED = re.compile(r"^process_start_time_seconds (\d+(?:\.\d+)?(?:e\+?\d+)?)$", re.MULTILINE)
_PORT = re.compile(r"tcp://\S+:(\d{1,5})")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
MAX_TOKENS = 1 << 40


class EventSource(msgspec.Struct, frozen=True):
    """ZeroMQ endpoints of a server's KV events, on its own machine. `replay`: where it says them again, "" if it does
    not; `topic`: of its messages."""

    endpoint: str
    replay: str = ""
    topic: str = ""


class Description(msgspec.Struct, frozen=True):
    """What a server says of itself. `models`: the entries of `/v1/models`; `kv_tokens`: tokens that its KV memory
    holds; `block_tokens`: tokens of a block, which it caches at once; `longest`: tokens of the longest request, prompt
    and answer; `started_s`: when its process started, in seconds since 1970; `events`: where it publishes its KV
    events. Each is 0, "" or None where it does not say."""

    models: tuple[dict[str, Any], ...]
    kv_tokens: int = 0
    kind: str = ""
    version: str = ""
    block_tokens: int = 0
    longest: int = 0
    started_s: float = 0.0
    events: EventSource | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may ask for, other names of a model included."""
        found = [str(each["id"]) for each in self.models]
        return tuple(dict.fromkeys(found + [name for each in self.models for name in aliases_of(each)]))


def aliases_of(entry: Mapping[str, Any]) -> list[str]:
    """Returns the other names of a model in an entry of `/v1/models`."""
    aliases = entry.get("aliases")
    return [name for name in aliases if isinstance(name, str)] if isinstance(aliases, list) else []


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class _Source(msgspec.Struct):
    """Of vLLM's `/kv_event_sources`, by rank."""

    publisher: str = ""
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: Annotated[str, msgspec.Meta(max_length=1024)] = ""


_sources = msgspec.json.Decoder(dict[str, _Source]).decode


def read_models(page: bytes) -> Description:
    """Reads `/v1/models`. Raises ValueError where it is of another form."""
    models = tuple(msgspec.json.decode(page, type=_Models).data)
    if not all(isinstance(each.get("id"), str) for each in models):
        raise ValueError(f"{MODELS} names no models")
    owners = [KINDS.get(str(each.get("owned_by")), "") for each in models]
    lengths = [_count(each.get("max_model_len")) or _count(_of(each.get("meta"), "n_ctx")) for each in models]
    return Description(models, kind=next(filter(None, owners), ""), longest=max(lengths, default=0))


def read_pages(told: Description, pages: Mapping[str, bytes], host: str = "") -> Description:
    """Returns what the other pages add. A page of another form adds nothing. `host`: the server's, as it is reached
    from here."""
    metrics = pages.get(METRICS, b"").decode("utf8", "replace")
    found: dict[str, Any] = {
        "kind": told.kind or next((k for k in ("vllm", "sglang") if f"\n{k}:" in f"\n{metrics}"), "")
    }
    if (memory := _VLLM_MEMORY.search(metrics)) is not None:
        labels = dict(_LABEL.findall(memory[1]))
        found["block_tokens"] = _count(labels.get("block_size"))
        found["kv_tokens"] = _count(labels.get("num_gpu_blocks")) * found["block_tokens"]
    info = _object(pages.get("/get_server_info", b"")) | dict(_SGLANG.findall(metrics))
    found.setdefault("kv_tokens", _count(info.get("max_total_num_tokens")))
    found.setdefault("block_tokens", _count(info.get("page_size")))
    props = _object(pages.get("/props", b""))
    length = _count(_of(props.get("default_generation_settings"), "n_ctx"))
    found["kv_tokens"] = found["kv_tokens"] or length * _count(props.get("total_slots"))
    started = _STARTED.search(metrics)
    found["started_s"] = float(started[1]) if started is not None else 0.0
    found["events"] = _events(pages.get(SOURCES, b""), host) if found["kind"] == "vllm" else None
    versions = (
        _object(pages.get("/version", b"")).get("version"),
        _object(pages.get("/api/version", b"")).get("version"),
        info.get("version"),
        props.get("build_info"),
    )
    found["version"] = next((each for each in versions if isinstance(each, str)), "")[:64]
    return msgspec.structs.replace(told, **found, longest=told.longest or length)


def _events(page: bytes, host: str) -> EventSource | None:
    """Returns where a server publishes KV events, if it does so, and has one cache."""
    try:
        told = _sources(page) if page else {}
    except (msgspec.DecodeError, RecursionError):
        return None
    (source, *others) = [*told.values()] or [_Source()]
    endpoint = _reachable(source.endpoint, host)
    if others or source.publisher != "zmq" or not endpoint:
        return None
    return EventSource(endpoint, _reachable(source.replay_endpoint or "", host), source.topic)


def _reachable(endpoint: str, host: str) -> str:
    """Returns an endpoint as it is reached from here, "" if it is none of TCP. Whatever machine a server names, its own
    is connected to."""
    port = _PORT.fullmatch(endpoint)
    if port is None or not host or not 0 < int(port[1]) < 1 << 16:
        return ""
    return f"tcp://[{host}]:{port[1]}" if ":" in host else f"tcp://{host}:{port[1]}"


def _object(page: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(page) if page else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def _count(given: Any) -> int:
    """A count of tokens or blocks, 0 where it is none."""
    try:
        number = int(float(given))
    except (TypeError, ValueError, OverflowError):
        return 0
    return number if 0 < number <= MAX_TOKENS else 0
