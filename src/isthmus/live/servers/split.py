"""Prefill and decode on separate stock servers, by HTTP alone: the requests of both legs, and how KV is handed over.

vLLM's connectors (NIXL, Mooncake) take a dictionary, `kv_transfer_params`: the prefill leg asks with one that the KV is
kept, and the decode leg brings one that says where. Each is good for one request: used twice, it gives tokens of
another prompt. SGLang's servers meet in a *room* that both legs name, and are asked at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Raw
from msgspec.structs import replace

from isthmus.core.conductor import LinkRule, LinksMeasured, LinkState, Rules
from isthmus.core.errors import RequestError
from isthmus.core.types import MIXED, NS_PER_MS, NS_PER_S, PREFILL, PassedRequest, RequestId, Role
from isthmus.live.servers.plain import MAX_TOLD_BYTES, PlainClient, Response

T = TypeVar("T")
CLUSTERS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.MIXED: ""}
"""Clusters of servers by the option that names them: a prompt goes from one to another by the conductor's rules of
offloading, and servers without either option hand nothing over."""
HANDOVER_MS = 30
"""Of a prompt's KV, before any was measured."""
HANDOVER_WEIGHT, HANDOVER_MOST = 1 / 8, 4
"""Of the latest hand-over in the mean; and as how many times the mean one counts at most, since two servers that meet
take seconds, once."""
LINK_BYTES_PER_S = 1 << 50
"""KV of servers is not counted in bytes: its way is not known."""
BOOTSTRAP_PORT = 8998
"""Where prefill servers with Mooncake's connector are asked, and SGLang's that do not tell another one."""
MAX_ANSWER_BYTES = MAX_TOLD_BYTES
PARAMS = "kv_transfer_params"
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
RELEASED_MODEL = "isthmus-releases-kv"
_PATHS = ("/v1/completions", "/v1/chat/completions")
_WHOLE = {
    "n": (b"1", b"null"),
    "best_of": (b"1", b"null"),
    "use_beam_search": (b"false", b"null"),
    "echo": (b"false", b"null"),
    "prompt_logprobs": (b"null",),
    "prompt_embeds": (b"null",),
}
"""Fields with the values of requests that are one sequence, whose prompt need not be computed where it is answered."""
_NOT_FOR_PREFILL = frozenset(
    ("stream_options", "min_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs", PARAMS)
)
_ONE_TOKEN = {"max_tokens": Raw(b"1"), "stream": Raw(b"false"), "ignore_eos": Raw(b"true")}
"""The answer of the prefill leg is one token and not streamed: streams bring no dictionary, and KV is kept of answers
that end by their length alone."""


def divided(rules: Rules, threshold: int | None) -> Rules:
    """Returns rules by which prompts with more uncached tokens than `threshold` are computed by prefill servers; None:
    those that cost less there."""
    link = LinkRule(CLUSTERS[PREFILL], CLUSTERS[Role.DECODE], LINK_BYTES_PER_S, 2 * HANDOVER_MS * NS_PER_MS)
    is_free = threshold is None
    return replace(rules, links=(link,), threshold=threshold, priced=is_free, control=is_free)


class HandoverTime:
    """Learns the time from the decode leg of a request to its first bytes, which a prompt that is computed elsewhere
    takes longer."""

    def __init__(self) -> None:
        self._mean_ns, self._told_ns = float(HANDOVER_MS * NS_PER_MS), 0

    def add(self, taken_ns: float, now_ns: int) -> LinksMeasured | None:
        """Takes the time of a hand-over. Returns what the conductor is to be told, once a second."""
        taken_ns = min(taken_ns, HANDOVER_MOST * self._mean_ns)
        self._mean_ns += (taken_ns - self._mean_ns) * HANDOVER_WEIGHT
        if now_ns - self._told_ns < NS_PER_S:
            return None
        self._told_ns = now_ns
        return self.measured()

    def measured(self) -> LinksMeasured:
        """Returns what the conductor is to be told also when a server joins: it sets its threshold anew."""
        link = LinkState(CLUSTERS[PREFILL], CLUSTERS[Role.DECODE], up=True, rtt_ns=round(2 * self._mean_ns))
        return LinksMeasured((link,))


class Nixl(msgspec.Struct, frozen=True):
    """vLLM whose answer to the prefill leg has the dictionary for the decode leg."""

    def asked(self) -> Asked:
        return Asked(b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
                     b'"remote_block_ids":null,"remote_host":null,"remote_port":null}')  # fmt: skip


class Mooncake(msgspec.Struct, frozen=True):
    """vLLM whose decode servers ask the prefill server's `engine` at `address`, by an id that is drawn here."""

    engine: str
    address: str

    def asked(self) -> Asked:
        name = secrets.token_hex(16)
        sent = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        then = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self.engine,
            "remote_bootstrap_addr": self.address,
            "transfer_id": name,
        }
        return Asked(msgspec.json.encode(sent), msgspec.json.encode(then))


class Sglang(msgspec.Struct, frozen=True):
    """SGLang whose decode servers meet the prefill server at `host`, in a room that is drawn here. None of the two
    computes a whole request."""

    host: str
    port: int

    def in_room(self, passed: PassedRequest) -> PassedRequest:
        """Returns the request of both legs. SGLang gives further sequences of it the rooms that follow."""
        values = (self.host, self.port, secrets.randbelow(1 << 62))
        room = msgspec.json.encode(dict(zip(ROOM, values, strict=True)))
        return replace(passed, body=with_fields(passed.body, room[1:-1]))


Transfer = Nixl | Mooncake | Sglang


class Asked(msgspec.Struct, frozen=True):
    """Dictionaries in JSON: of the prefill leg, and of the decode leg where the prefill server does not tell it."""

    prefill: bytes
    decode: bytes = b""


class Fields(msgspec.Struct, frozen=True):
    """The fields of a body, in JSON. `generates`: the request is for an answer; `divides`: for one sequence, whose KV
    vLLM hands over."""

    values: Mapping[str, Raw]
    generates: bool
    divides: bool


def read(passed: PassedRequest) -> Fields | None:
    """Reads a request that servers with KV connectors shall get; None if it has no JSON. Raises RequestError where its
    body cannot be read, or itself says whose KV to take: that may be a stranger's."""
    kinds = [value for name, value in passed.headers if name.lower() == "content-type"]
    if not passed.body or any(kind.lower().lstrip().startswith("multipart/form-data") for kind in kinds):
        return None
    try:
        values = msgspec.json.decode(passed.body, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is no JSON object that can be read: {error}") from None
    for name in (PARAMS, *ROOM):
        if name in values:
            raise RequestError(f"{name} is not for clients: leave it out", param=name)
    if b"{" in bytes(values.get("vllm_xargs", b"")):
        try:
            inner = msgspec.json.decode(values["vllm_xargs"], type=dict[str, Raw])
        except (msgspec.DecodeError, RecursionError):
            inner = {PARAMS: Raw()}
        if PARAMS in inner:
            raise RequestError(f"vllm_xargs may not hold {PARAMS}", param="vllm_xargs")
    path = passed.target.partition("?")[0].rstrip("/")
    generates = passed.method == "POST" and path in (*_PATHS, "/generate")
    return Fields(values, generates, generates and path in _PATHS and _is_one(values))


def _is_one(values: Mapping[str, Raw]) -> bool:
    for name, plain in _WHOLE.items():
        if name in values and bytes(values[name]).strip() not in plain:
            return False
    # A list of numbers is one prompt, any other list several, each of which would take the same KV.
    prompt = bytes(values.get("prompt", b"")).lstrip()
    return not prompt.startswith(b"[") or prompt[1:32].lstrip()[:1].isdigit()


def with_fields(body: bytes, fields: bytes) -> bytes:
    """Returns a body of JSON with further `fields` before its own, which stay as they are."""
    before, brace, after = body.partition(b"{")
    comma = b"" if after.lstrip().startswith(b"}") else b","
    return before + brace + fields + comma + after


def prefill_leg(passed: PassedRequest, fields: Fields, asked: Asked) -> PassedRequest:
    """Returns the request by which a server computes a prompt and keeps its KV."""
    body = {name: value for name, value in fields.values.items() if name not in _NOT_FOR_PREFILL}
    body |= _ONE_TOKEN | {PARAMS: Raw(asked.prefill)}
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = Raw(b"1")
    headers = tuple([each for each in passed.headers if each[0].lower() != "accept-encoding"])
    return replace(passed, body=msgspec.json.encode(body), headers=headers)


def decode_leg(passed: PassedRequest, params: bytes) -> PassedRequest:
    """Returns the client's request with the dictionary `params`."""
    return replace(passed, body=with_fields(passed.body, b'"' + PARAMS.encode() + b'":' + params))


def release(params: bytes) -> PassedRequest:
    """Returns a request that a decode server cannot serve: as it refuses it, vLLM (0.32) tells the prefill server to
    free the KV."""
    body = b'{"model":"%s","prompt":[0],"max_tokens":1}' % RELEASED_MODEL.encode()
    asked = PassedRequest(RequestId(""), "POST", _PATHS[0], (("Content-Type", "application/json"),), body)
    return decode_leg(asked, params)


class NotKeptError(ValueError):
    """A prefill server has computed a prompt, and keeps no KV of it."""


class Computed(msgspec.Struct, frozen=True):
    """The answer to a prefill leg: the dictionary for the decode leg, and the usage, in JSON."""

    params: bytes
    usage: bytes


class _Answer(msgspec.Struct):
    kv_transfer_params: Raw = Raw()
    usage: Raw = Raw()


class _Params(msgspec.Struct):
    do_remote_prefill: bool = False


async def read_answer(response: Response) -> bytes:
    """Returns a whole answer. Raises aiohttp.ClientError where it breaks off, ValueError where it is too long."""
    found = bytearray()
    async for chunk in response.body():
        found += chunk
        if len(found) > MAX_ANSWER_BYTES:
            response.abort()
            raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(found)


def computed(answer: bytes, asked: Asked) -> Computed:
    """Reads an answer to a prefill leg. Raises ValueError for one that cannot be read, NotKeptError if KV is not
    kept."""
    found = msgspec.json.decode(answer, type=_Answer)
    params = asked.decode or bytes(found.kv_transfer_params)
    if not params or params == b"null" or not msgspec.json.decode(params, type=_Params).do_remote_prefill:
        raise NotKeptError(f"it keeps no KV (no {PARAMS} in its answer): start it with a KV connector")
    return Computed(params, bytes(found.usage))


class _SglangInfo(msgspec.Struct):
    disaggregation_mode: str = ""
    disaggregation_bootstrap_port: int = BOOTSTRAP_PORT


class _Engine(msgspec.Struct):
    engine_id: str


async def transfer_of(client: PlainClient, role: Role, kind: str) -> Transfer:
    """Asks a prefill or decode server how its KV is handed over. Raises ValueError if it is of the other role."""
    host = str(urlsplit(client.url).hostname)
    if kind != "vllm":
        for path in ("/server_info", "/get_server_info"):
            found = await _told(client, path, _SglangInfo)
            if found is None or not found.disaggregation_mode:
                continue
            if found.disaggregation_mode != role:
                raise ValueError(f"runs with --disaggregation-mode {found.disaggregation_mode}, not {role}")
            return Sglang(host, found.disaggregation_bootstrap_port)
    if role is PREFILL:
        address = f"http://{f'[{host}]' if ':' in host else host}:{BOOTSTRAP_PORT}"
        engines = await _told(client.beside(address), "/query", dict[str, _Engine])
        if engines:
            if len(engines) > 1:
                raise ValueError(f"has {len(engines)} data-parallel ranks behind Mooncake's connector, not one")
            return Mooncake(next(iter(engines.values())).engine_id, address)
    return Nixl()


async def _told(client: PlainClient, path: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(await client.get(path), type=kind)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


def role_of(role: Role, transfer: Transfer | None) -> Role:
    """Returns what a server does, for the conductor: one that decodes can compute a prompt as well, except SGLang's."""
    return MIXED if role is Role.DECODE and not isinstance(transfer, Sglang) else role
