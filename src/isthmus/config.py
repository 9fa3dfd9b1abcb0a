"""The one configuration tree: built once from a YAML file and flags, checked at the edge, never written again.

Unknown keys are refused with the nearest valid name. The environment is read in this module only.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from isthmus.core.errors import ConfigError
from isthmus.core.types import Reuse
from isthmus.yaml_file import Document, read_document

_SIZE = re.compile(r"((?:\d(?:_?\d)*(?:\.\d*)?|\.\d+)(?:e\+?\d\d?)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
POLICIES = ("random", "round_robin", "least_loaded", "sticky", "local_aware", "mooncake", "isthmus")
LENDINGS = ("none", "isthmus")
_NAME = re.compile(r"(?!x-)[a-zA-Z][a-zA-Z0-9-]*")
_KEY = re.compile(r"[!-~]{1,512}")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z*?#]+")
_KEY_VARIABLE, _TOKEN_VARIABLE = "ISTHMUS_API_KEY", "ISTHMUS_TOKEN"
_RAYS = ("RAY_", "SPT_NOENV", "PYTHONBREAKPOINT")
"""How names begin that Ray puts into the environment of its workers, its token's among them."""
_SECRETS = ("auth", "token")
"""What complaints never quote: somebody writes a key where its digest belongs."""
_BOOL = "true_or_false"
MAX_COMPLAINTS = 20
"""Of one configuration, each a line."""
DEFAULT_TENANT = "default"
"""Whose the keys are that come without a tenant: those of `--api-key` and of the environment."""
_NOBODY_KNOWN = "without API keys nobody knows whose a request is"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBERS_OF = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "gbps": "Gbit/s"}
"""By the ends of options' names."""


def parse_bytes(value: Any) -> int:
    """`536870912`, `2e9`, `512MiB` or `1.5GB` in bytes. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or e.g. 512MiB")
    return int(Decimal(match[1]) * _UNITS[(match[2] or "").lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


def _count(value: Any) -> Any:
    """`prefill: 2` is short for `prefill: {count: 2}`."""
    return {"count": value} if isinstance(value, int | float | str) else value


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, defer_build=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        """Without `x-…` keys, which are for anchors and notes, and without sections and lists that are empty, perhaps
        since all their lines are comments."""
        if values is None:
            return {}
        if not isinstance(values, dict):
            return values
        return {
            key: value
            for key, value in values.items()
            if not str(key).startswith("x-") and not (value is None and cls._holds_more(key))
        }

    @classmethod
    def _holds_more(cls, key: str) -> bool:
        """Whether an option is a section, a list, or names and values."""
        field = cls.model_fields.get(key)
        default = None if field is None else field.get_default(call_default_factory=True)
        return isinstance(default, BaseModel | tuple | dict)

    @field_validator("*", mode="before")
    @classmethod
    def _no_true_or_false(cls, value: Any) -> Any:
        """No option is one, and none must count as 1 or 0."""
        return _no_flag(value)


def _policy(name: str, known: Sequence[str]) -> str:
    """One of ours, or `FILE.py:FUNCTION` or `MODULE:FUNCTION`, which are loaded where they decide."""
    if name in known or re.fullmatch(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*", name):
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    valid = f"valid: {', '.join(known)}, or FILE.py:FUNCTION"
    raise ValueError(f"no policy; did you mean {near[0]!r}?" if near else f"no policy; {valid}")


def _named(value: Any) -> Any:
    """`policy: mooncake` is short for `policy: {name: mooncake}`."""
    return {"name": value} if isinstance(value, int | float | str) else value


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError(_BOOL, "true or false is no value of this option")
    return value


Parameter = Annotated[float, Field(ge=0), BeforeValidator(_no_flag)]


class _Choice(_Section):
    """One of several rules by its name; other keys are parameters of this rule, each a number."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Parameter]

    @property
    def parameters(self) -> tuple[tuple[str, float], ...]:
        return tuple(self.__pydantic_extra__.items())


class PolicyConfig(_Choice):
    name: str

    @field_validator("name")
    @classmethod
    def _is_policy(cls, name: str) -> str:
        return _policy(name, POLICIES)


class AdmissionConfig(_Choice):
    name: Literal["none", "baseline", "early", "predictive", "survival"]


class RoleConfig(_Section):
    """Nodes of one role. `hardware`, `gpus`, `max_sequences`, `kv_memory`: as in `engine`, for this role alone.
    `price`: of one of them, as of a cluster's nodes.

    `pipeline`: so many prefill nodes share one prompt's layers (chunked pipeline parallelism): `count` is
    a multiple of it, and each such group works as one node.
    """

    count: int = Field(1, ge=0, le=4096)
    hardware: str | None = None
    gpus: int | None = Field(None, ge=1, le=64)
    max_sequences: int | None = Field(None, ge=1, le=4096)
    kv_memory: Bytes | None = Field(None, gt=0)
    pipeline: int = Field(1, ge=1, le=64)
    price: float | None = Field(None, gt=0)


Roles = Annotated[RoleConfig, BeforeValidator(_count)]


NO_NODES = RoleConfig(count=0)


class RolesConfig(_Section):
    """How many nodes of each role; each node is a process. Of a role that is not named there is none."""

    prefill: Roles = NO_NODES
    decode: Roles = NO_NODES
    mixed: Roles = NO_NODES
    attention: Roles = NO_NODES


def _tokens(value: Any) -> Any:
    """None for `auto`."""
    return None if value == "auto" else value


Threshold = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_tokens)]


class ClusterConfig(_Section):
    """One of several clusters. `hardware`, `gpus`, `cost`: as in `engine`, for its nodes. `price`: of one node an hour,
    in whatever currency, for `isthmus plan`."""

    roles: RolesConfig = RolesConfig()
    hardware: str | None = None
    gpus: int | None = Field(None, ge=1, le=64)
    cost: str | dict[str, Any] | None = None
    price: float = Field(1.0, gt=0)


class LinkConfig(_Section):
    """What joins two clusters: so many Gbps each way, and how long a byte takes there and an answer back.

    `emulate`: nodes of one machine reach each other through a proxy that is as slow (live only; `none` where the link
    is a real one).
    """

    between: tuple[str, str]
    gbps: float = Field(gt=0)
    rtt_ms: float = Field(0.0, ge=0, le=10_000)
    emulate: Literal["proxy", "none"] = "proxy"


class OffloadConfig(_Section):
    """Which prompts another cluster prefills: with `routing` `threshold` those with more than `threshold` uncached
    tokens, with `priced` those that are cheaper there (predicted TTFT plus what the node time costs others).

    `auto` solves it, and again as lengths change. `cache`: what counts as cached there, `scarce` judges each cluster
    by its own cache, `abundant` by the best, copied over the link; `auto` decides by how busy the link is. `control`:
    `link` raises the threshold while the link is congested, and keeps all prompts local while it is down or slow;
    `convert`: `auto` turns nodes between prefill and decode, one at a time, `cool_down_s` apart.
    """

    routing: Literal["threshold", "priced"] = "threshold"
    threshold: Threshold = None
    cache: Literal["scarce", "abundant", "auto"] = "scarce"
    control: Literal["none", "link"] = "link"
    convert: Literal["none", "auto"] = "none"
    cool_down_s: float = Field(60.0, gt=0)
    period_s: float = Field(1.0, gt=0, le=60)


class VllmConfig(_Section):
    """A vLLM server beside each node (docs/vllm.md). `python`: of the environment that has it, None is this one;
    `args`, `env`: for the server, after those that a node needs; `logs`: the folder where all that servers say goes, to
    a file for each node. `attach`: the URL of one that runs already, which was given `served_model_name` and meets its
    node in the folder `sockets`.

    `transfer`: how KV goes from node to node: through the nodes' caches, sealed (`pool`), or by the engines themselves
    (`nixl`).
    """

    python: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    logs: str | None = None
    attach: str | None = None
    served_model_name: str | None = None
    sockets: str | None = None
    transfer: Literal["pool", "nixl"] = "pool"

    @field_validator("env")
    @classmethod
    def _are_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
                raise ValueError(f"{name!r} is no name of an environment variable")
        return env

    @field_validator("attach")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^/]+/?", url):
            raise ValueError("write http://HOST:PORT")
        return url

    @model_validator(mode="after")
    def _attaches_whole(self) -> VllmConfig:
        if self.attach is not None and self.sockets is None:
            raise ValueError("attach: give sockets too, the folder where the server and its node meet")
        for name in ("sockets", "served_model_name"):
            if self.attach is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: only with attach; a server that is started here is told")
        if self.attach is not None and (self.python is not None or self.args or self.env or self.logs):
            raise ValueError("attach: python, args, env and logs are for a server that is started here")
        return self


class EngineConfig(_Section):
    """One node's engine. `None` means: decided from the model or the machine.

    `emulated` sleeps as long as `gpus` of `hardware` would compute. `cost`: a measured curve, a file of
    `isthmus profile` or its values, in place of the analytic model of `hardware`.
    `batches`: so many take turns in a step whose KV lies with other nodes.
    """

    kind: Literal["torch", "emulated", "vllm"] = "torch"
    hardware: str | None = None
    gpus: int = Field(1, ge=1, le=64)
    cost: str | dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d+)?)$")
    threads: int | None = Field(None, ge=1, le=1024)
    block_size: int = Field(16, ge=1, le=1024)
    kv_memory: Bytes = Field(2**30, gt=0)
    token_budget: int = Field(512, ge=1, le=1 << 20)
    prompt_batch: int | None = Field(None, ge=1)
    max_sequences: int = Field(64, ge=1, le=4096)
    max_length: int | None = Field(None, ge=2)
    batches: int | None = Field(None, ge=1, le=16)
    vllm: VllmConfig = VllmConfig()


class LendingConfig(_Section):
    """Whether nodes lend each other KV memory for requests that decode, and by which rule that is decided.

    `reserve`: of its memory, what a node keeps free when it lends or takes back; `period_s`: how often a node says at
    most what its memory is used for.
    """

    policy: str = "none"
    reserve: float = Field(0.1, ge=0, lt=1)
    period_s: float = Field(0.25, gt=0, le=60)

    @field_validator("policy")
    @classmethod
    def _is_policy(cls, name: str) -> str:
        return _policy(name, LENDINGS)


class LimitsConfig(_Section):
    """What is accepted at once and of one request, how often a request is re-routed, and how long waits may last.

    Of a body: `body_bytes`, `json_depth` of lists and objects within each other, entries of `messages` and of `tools`.
    A large one, or one with a grammar, is read in a process of its own, for `prepare_s` CPU seconds and in
    `prepare_memory`; so many are `preparing` or wait for it. A grammar's text has up to `grammar_bytes`, compiles in
    `grammar_s` CPU seconds and takes `grammar_memory` on a node; `grammars_memory`: of compiled ones that no request
    follows.

    `transfer_s`: in which a transfer must bring something; `link_s`: in which a link between clusters must, while
    something is on its way over it; `greeting_s`: in which a connection between processes must begin and say what it is
    for; `greetings`: so many may be about to at once, of each process.
    `wait_s`: how long a new request waits for a node of a kind of which there is none.

    Of HTTP, whoever sends it: `header_bytes`, `headers` of one request, `header_s`, `body_s` until they are whole;
    `bodies`: bytes of all request bodies under way; `connections`: None is what the descriptor limit allows.
    """

    max_requests: int = Field(1024, ge=1)
    max_attempts: int = Field(3, ge=1, le=10)
    body_bytes: Bytes = Field(8 << 20, gt=0, le=1 << 30)
    json_depth: int = Field(100, ge=1, le=190)
    messages: int = Field(10_000, ge=1)
    tools: int = Field(1024, ge=1)
    preparing: int = Field(256, ge=1)
    prepare_s: float = Field(5.0, gt=0)
    prepare_memory: Bytes = Field(512 << 20, ge=64 << 20)
    grammar_bytes: Bytes = Field(128 << 10, gt=0)
    grammar_s: float = Field(2.0, gt=0)
    grammar_memory: Bytes = Field(256 << 20, ge=16 << 20)
    grammars_memory: Bytes = Field(32 << 20, ge=0)
    start_s: float = Field(120.0, gt=0)
    drain_s: float = Field(30.0, ge=0)
    silence_s: float = Field(3.0, gt=0)
    rejoin_s: float = Field(30.0, ge=0)
    transfer_s: float = Field(30.0, gt=0)
    link_s: float = Field(3.0, gt=0)
    greeting_s: float = Field(5.0, gt=0)
    greetings: int = Field(128, ge=1)
    wait_s: float = Field(2.0, ge=0, le=60)
    header_bytes: Bytes = Field(64 * 2**10, ge=1024, le=2**20)
    headers: int = Field(100, ge=1, le=10_000)
    header_s: float = Field(5.0, gt=0)
    body_s: float = Field(30.0, gt=0)
    bodies: Bytes = Field(128 * 2**20, ge=2**20)
    connections: int | None = Field(None, ge=1)


class CacheConfig(_Section):
    """What each node keeps of computed KV, beside its engine's memory. `folder`: of the SSD tier, each node has one of
    its own name in it. `share`: whether nodes of one host read each other's blocks where they lie."""

    dram: Bytes = 0
    ssd: Bytes = 0
    folder: str | None = None
    share: Literal["host", "none"] = "host"


class ReuseConfig(_Section):
    """Which KV of earlier prompts requests may be computed with (docs/reuse.md). `default`: those that say nothing, of
    tenants that are not in `tenants`, which are of `auth.keys`; like these, `tenants` are the gateway's alone.

    `selector`: how prompts of `chunks` are mended; `kept`: whether what a selector drops of a prompt's KV is dropped
    (`packed`); `max_prompts`: so many are remembered; `min_tokens`: a prompt with
    fewer tokens to compute is computed as ever.
    """

    default: Reuse = Reuse.EXACT
    tenants: dict[str, Reuse] = Field(default_factory=dict, exclude=True)
    selector: Literal["cacheblend", "epic"] = "cacheblend"
    kept: Literal["packed", "whole"] = "packed"
    max_prompts: int = Field(1024, ge=1)
    min_tokens: int = Field(700, ge=1)


class NetworkConfig(_Section):
    """Links between nodes. `node_gbps`: of a node, each way, None as the hardware has; `handover_gbps`: a rail of its
    own for KV from prefill to decode, None shares the node's. `rtt_us`: of a question to another node and its answer
    what does not depend on their size (simulated and planned only; the default is NCCL's between two H100 in Lamina).
    `connections`: of each session; `resume_s`: how long a session outlives its last connection; `compression`: of KV
    where a link, not computing, would be waited for (`int8` loses precision, so that its blocks have names of their
    own).
    """

    node_gbps: float | None = Field(None, gt=0)
    handover_gbps: float | None = Field(None, gt=0)
    rtt_us: float = Field(66.6, ge=0, le=1_000_000)
    connections: int = Field(2, ge=1, le=64)
    resume_s: float = Field(0.0, ge=0, le=60)
    compression: Literal["none", "lossless", "int8"] = "none"


class TlsConfig(_Section):
    """TLS 1.3 with certificates on both sides, for all sessions of nodes (docs/machines.md).

    `mode`: `auto` as soon as nodes join at an address that is not loopback, with an authority that the head makes;
    `none` leaves sessions plain. `folder`: where the authority's key, and a token that was drawn, are kept, else they
    live as long as the head; with a folder loopback has TLS too. `certificate`, `key`, `authority`: PEM files of the
    operator's in place of all that.
    """

    mode: Literal["auto", "none"] = "auto"
    folder: str | None = None
    certificate: str | None = None
    key: str | None = None
    authority: str | None = None

    @model_validator(mode="after")
    def _is_one_of_three(self) -> TlsConfig:
        files = [path is not None for path in (self.certificate, self.key, self.authority)]
        if any(files) and not all(files):
            raise ValueError("certificate, key and authority are needed, all three or none")
        if any(files) and self.folder is not None:
            raise ValueError("folder: only without certificate, key and authority")
        if self.mode == "none" and (any(files) or self.folder is not None):
            raise ValueError("mode: none leaves sessions plain; give no files and no folder beside it")
        return self


class HttpsConfig(_Section):
    """HTTPS for clients: PEM files, both or none. They are read again when they change."""

    certificate: str | None = None
    key: str | None = None

    @model_validator(mode="after")
    def _both(self) -> HttpsConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are needed, both or none")
        return self


def _origins(value: Any) -> Any:
    """`origins: https://chat.example.com` is short for a list of one."""
    return [value] if isinstance(value, str) else value


class CorsConfig(_Section):
    """Web pages that may ask the gateway, by their origins as browsers write them; `*`: any page. None: any page where
    requests need a key, else pages of this machine."""

    origins: Annotated[tuple[str, ...], BeforeValidator(_origins)] | None = None

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for origin in origins or ():
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; write SCHEME://HOST or SCHEME://HOST:PORT in lower case and without a "
                    "path, or '*'"
                )
        return origins


class KeyConfig(_Section):
    """One API key: whose it is, and its SHA-256 in hexadecimal. The key itself is nowhere."""

    tenant: str = Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TenantConfig(_Section):
    """What one tenant may ask for at most, None: as much as it likes. `requests_per_s`, `tokens_per_s` (of prompts and
    answers): on average, with so much at once as comes in `burst_s` of it; `concurrent`: HTTP requests in progress.
    `weight`: of its share, next to others', of queues and caches that are full."""

    requests_per_s: float | None = Field(None, gt=0, le=1e9)
    tokens_per_s: float | None = Field(None, gt=0, le=1e12)
    burst_s: float = Field(10.0, gt=0, le=3600)
    concurrent: int | None = Field(None, ge=1)
    weight: float = Field(1.0, ge=1e-3, le=1e3)


class AuthConfig(_Section):
    """Who may use the gateway; no keys: everybody. A tenant may have several keys, a key has one tenant.

    `tenants`: what tenants of `keys` may ask for; `default`: what the others may, and these where they say nothing.
    `metrics`: whether metrics name tenants.
    """

    keys: tuple[KeyConfig, ...] = ()
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    default: TenantConfig = TenantConfig()
    metrics: Literal["none", "tenants"] = "none"

    def of(self, tenant: str) -> TenantConfig:
        """What a tenant may ask for."""
        own = self.tenants.get(tenant)
        if own is None:
            return self.default
        return self.default.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})

    @model_validator(mode="after")
    def _one_tenant_each(self) -> AuthConfig:
        tenants = {key.sha256: key.tenant for key in self.keys}
        for key in self.keys:
            if tenants[key.sha256] != key.tenant:
                raise ValueError(f"tenants {key.tenant!r} and {tenants[key.sha256]!r} have the same key")
        return self


class SloConfig(_Section):
    """What a request is promised: time to first token, and the mean of its longest tenth of token gaps."""

    ttft_ms: int | None = Field(None, ge=1)
    tbt_ms: int | None = Field(None, ge=1)


class SchedulingConfig(_Section):
    """The knobs beside `policy`.

    `chunking`: how many prompt tokens an iteration with decodes takes, `engine.token_budget` or as many within it as
    keep `slo.tbt_ms`; `partial_prefills`: prompts that a node computes in parts at the same time, above 1 with
    `order: fcfs` only;
    `order`: of a node's queue, first come or promise order; `reserve`: share of the TTFT limit kept back when
    promising; `load_limit`: of all admissions.
    """

    admission: Annotated[AdmissionConfig, BeforeValidator(_named)] = AdmissionConfig(name="none")
    order: Literal["fcfs", "promise"] = "fcfs"
    chunking: Literal["fixed", "tbt"] = "fixed"
    partial_prefills: int = Field(1, ge=1, le=64)
    reserve: float = Field(0.0, ge=0, lt=1)
    load_limit: float = Field(1.0, gt=0)


class RayConfig(_Section):
    """Of `placement: ray`. `spread`: on as few machines as hold them, or each node on one that has no other."""

    spread: Literal["pack", "strict"] = "pack"


class Config(_Section):
    """A deployment. `model`: a folder, a GGUF file, a hub id, or None for the default model. `tool_format`: how the
    model writes calls of tools, which `auto` takes from its chat template.

    `placement`: who starts the nodes: `isthmus serve`, on this machine or on those of a Ray cluster, or somebody else.
    `join_host`, `join_port`: where nodes of other machines join (0: a free port); `token`: what they must show,
    drawn at random when None. `auth` is the gateway's alone: no dump of a configuration has it.
    """

    model: str | None = None
    served_model_name: str | None = None
    tool_format: Literal["auto", "hermes", "llama3", "qwen_coder", "mistral"] = "auto"
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    placement: Literal["local", "ray", "join"] = "local"
    roles: RolesConfig = RolesConfig(prefill=RoleConfig(), decode=RoleConfig())
    clusters: dict[str, ClusterConfig] = Field(default_factory=dict)
    links: tuple[LinkConfig, ...] = ()
    offload: OffloadConfig = OffloadConfig()
    engine: EngineConfig = EngineConfig()
    policy: Annotated[PolicyConfig, BeforeValidator(_named)] = PolicyConfig(name="isthmus")
    scheduling: SchedulingConfig = SchedulingConfig()
    slo: SloConfig = SloConfig()
    cache: CacheConfig = CacheConfig()
    reuse: ReuseConfig = ReuseConfig()
    network: NetworkConfig = NetworkConfig()
    tls: TlsConfig = TlsConfig()
    https: HttpsConfig = HttpsConfig()
    cors: CorsConfig = CorsConfig()
    lending: LendingConfig = LendingConfig()
    limits: LimitsConfig = LimitsConfig()
    record: str | None = None
    ray: RayConfig = RayConfig()
    join_host: str = "127.0.0.1"
    join_port: int = Field(0, ge=0, le=65535)
    token: str | None = None
    auth: AuthConfig = Field(AuthConfig(), exclude=True, repr=False)

    @model_validator(mode="after")
    def _chunking_fits(self) -> Config:
        scheduling = self.scheduling
        if scheduling.chunking == "tbt" and self.slo.tbt_ms is None:
            raise ValueError("scheduling.chunking: tbt keeps slo.tbt_ms, which is not given; give it")
        if scheduling.partial_prefills > 1 and scheduling.order == "promise":
            raise ValueError(
                "scheduling.partial_prefills: above 1 needs scheduling.order: fcfs; promise order has a rule of its own"
            )
        return self

    @model_validator(mode="after")
    def _vllm_fits(self) -> Config:
        engine = self.engine
        if engine.kind != "vllm":
            if "vllm" in engine.model_fields_set:
                raise ValueError("engine.vllm: only with engine.kind: vllm")
            return self
        pool = engine.vllm.transfer == "pool"
        if pool and not self.cache.dram:
            raise ValueError(
                "cache.dram: vLLM nodes hand KV over through it; give it, or engine.vllm.transfer: nixl"
            )
        if not pool and (self.cache.dram or self.cache.ssd):
            raise ValueError("cache: with engine.vllm.transfer: nixl nodes keep nothing; leave it out")
        if not pool and self.clusters:
            raise ValueError("engine.vllm.transfer: nixl does not cross clusters; use pool")
        if self.network.compression == "int8":
            raise ValueError("network.compression: vLLM's KV is not ours to quantise; use none or lossless")
        if self.lending.policy != "none":
            raise ValueError("lending.policy: vLLM nodes lend no KV memory; use none")
        scheduling = self.scheduling
        for option, is_given in (
            ("engine.batches", engine.batches is not None),
            ("engine.prompt_batch", engine.prompt_batch is not None),
            ("scheduling.order: promise", scheduling.order != "fcfs"),
            ("scheduling.chunking: tbt", scheduling.chunking != "fixed"),
            ("scheduling.partial_prefills", scheduling.partial_prefills > 1),
        ):
            if is_given:
                raise ValueError(f"{option}: vLLM plans its own batches; leave it out")
        if engine.device not in (None, "cpu", "cuda"):
            raise ValueError(f"engine.device: vLLM nodes are each given a GPU; write cuda, not {engine.device}")
        if self.placement == "ray" and engine.device is None:
            raise ValueError(
                "engine.device: with placement: ray give cpu or cuda, so that Ray gives vLLM its GPUs"
            )
        self._check_vllm_roles()
        return self

    def _check_vllm_roles(self) -> None:
        vllm, clusters = self.engine.vllm, self.clusters
        nodes: dict[str, RoleConfig] = {
            f"clusters.{name}.roles.{role}": each for name in clusters for role, each in clusters[name].roles
        }
        nodes = nodes or {f"roles.{role}": each for role, each in self.roles}
        for where, each in nodes.items():
            if each.count and where.endswith(".attention"):
                raise ValueError(f"{where}: vLLM nodes attend to nobody else's KV; leave it out")
            if each.pipeline > 1:
                raise ValueError(f"{where}.pipeline: vLLM nodes form no pipeline groups; leave it out")
        gpus = [
            self.engine.gpus,
            *[each.gpus for each in clusters.values()],
            *[each.gpus for each in nodes.values()],
        ]
        if vllm.transfer == "pool" and any((count or 1) > 1 for count in gpus):
            raise ValueError("gpus: with engine.vllm.transfer: pool a server has one GPU; use nixl for more")
        if vllm.attach and self.placement != "join" and sum(each.count for each in nodes.values()) > 1:
            raise ValueError(
                "engine.vllm.attach: one server is one node; for several give placement: join, and each its own file"
            )

    @model_validator(mode="after")
    def _placement_fits(self) -> Config:
        if self.placement != "ray":
            if "ray" in self.model_fields_set:
                raise ValueError("ray: only with placement: ray")
            return self
        if any(link.emulate == "proxy" for link in self.links):
            raise ValueError(
                "links: emulate: proxy joins nodes of one machine; with placement: ray give emulate: none"
            )
        if self.engine.device not in (None, "cpu", "cuda"):
            raise ValueError(
                f"engine.device: with placement: ray write cuda, not {self.engine.device}: Ray says which one it is"
            )
        return self

    @model_validator(mode="after")
    def _clusters_fit(self) -> Config:
        if self.clusters and "roles" in self.model_fields_set:
            raise ValueError("roles: each of the clusters has its own; give none beside them")
        for name in self.clusters:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"clusters: {name!r} is no name; use letters, digits and -, a letter first, and not x-"
                )
        joined = set()
        for link in self.links:
            for end in link.between:
                if end not in self.clusters:
                    raise ValueError(
                        f"links: no cluster is named {end!r}; there are {', '.join(self.clusters) or 'none'}"
                    )
            if link.between[0] == link.between[1] or frozenset(link.between) in joined:
                raise ValueError(f"links: {' and '.join(link.between)} need one link, between two clusters")
            joined.add(frozenset(link.between))
        return self


def load_config(path: Path | None, overrides: dict[str, Any]) -> Config:
    """The file's values with `overrides` (dotted names, None skipped) on top.

    Raises ConfigError: for each mistake one line with file, line, key and what is expected.
    """
    document = None if path is None else read_document(path)
    values = {} if document is None else dict(document.values)
    flags = {tuple(dotted.split(".")): value for dotted, value in overrides.items() if value is not None}
    if (
        not values.get("roles")
        and not values.get("clusters")
        and any(keys[:-2] == ("roles",) for keys in flags)
    ):
        values["roles"] = {"prefill": 1, "decode": 1}  # the default, of which a flag changes one number
    for keys, value in flags.items():
        _assign(values, keys, value)
    for _ in range(2):
        try:
            return Config.model_validate(values)
        except ValidationError as error:
            problems = error.errors(include_url=False)
        if document is None or not _take_as_written(values, document, problems):
            break
    raise ConfigError("\n".join(_lines(path, document, flags, values, problems)))


def _lines(
    path: Path | None,
    document: Document | None,
    flags: Mapping[tuple[str, ...], Any],
    values: dict[str, Any],
    problems: list[ErrorDetails],
) -> list[str]:
    """A line for each mistake: of the command line first, then as they stand in the file."""
    found: dict[tuple[int | str, ...], tuple[int, str]] = {}
    for problem in problems:
        place = _place(values, problem["loc"])
        key = problem["loc"] if problem["type"] == "missing" else place
        # A mistake of several options has no place; its first words name one of them.
        named = place or tuple(_message(problem).partition(":")[0].split("."))
        line = None if document is None else document.line(named)
        source = str(path) if line is None else f"{path}:{line}"
        if path is None or any(place[: len(flag)] == flag for flag in flags):
            source, line = "command line", None
        found.setdefault(key, (line or 0, f"{source}: {_explain(key, problem)}"))
    lines = [text for _, text in sorted(found.values(), key=lambda each: each[0])]
    more = len(lines) - MAX_COMPLAINTS
    return [*lines[:MAX_COMPLAINTS], f"{path or 'command line'}: and {more} more"] if more > 0 else lines


def _assign(values: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        inner = values.get(key)
        if (keys[0], depth) == ("roles", 1):
            inner = _count(inner)
        if not isinstance(inner, dict | None):
            return  # no section, which is refused
        values[key] = inner = dict(inner) if isinstance(inner, dict) else {}
        values = inner
    values[keys[-1]] = value


def _take_as_written(values: Any, document: Document, problems: list[ErrorDetails]) -> bool:
    """Where a text is asked for, `007` and `true` are these texts. True: there are such, put into the values."""
    found = False
    for problem in problems:
        place = _place(values, problem["loc"])
        text = document.text(place) if problem["type"] in ("string_type", _BOOL) else None
        if text is not None:
            holder = values
            for part in place[:-1]:
                holder = holder[part]
            holder[place[-1]], found = text, True
    return found


def _place(values: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """As much of a mistake's location as the values have: unions and short forms add to it."""
    for depth, part in enumerate(location):
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return location[:depth]
    return location


def _message(problem: ErrorDetails) -> str:
    return problem["msg"].removeprefix("Value error, ")


def _explain(place: tuple[int | str, ...], problem: ErrorDetails) -> str:
    """One mistake as one line."""
    where = ".".join(str(part) for part in place)
    if not where.isprintable():  # a name that the user chose
        where = repr(where)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(place[-1]), _keys_beside(place), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; valid: {', '.join(_keys_beside(place))}"
        return f"unknown key {_short(repr('.'.join(map(str, place))))}{hint}"
    if not where:
        return _message(problem)
    if place[0] in _SECRETS:
        return f"{where}: {_message(problem)}"
    if problem["type"] == "missing":
        return f"{where}: is missing; give it"
    if problem["input"] is None:
        return f"{where}: nothing is given; give a value, or leave the key out"
    return f"{where}: {_message(problem)} (found {_short(repr(problem['input']))}){_nearest_word(problem)}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


def _nearest_word(problem: ErrorDetails) -> str:
    """What was meant, where an option is one of some words, or is of a unit."""
    if problem["type"] in ("int_parsing", "float_parsing"):
        unit = _NUMBERS_OF.get(str(problem["loc"][-1]).rpartition("_")[2])
        return f"; write a number of {unit}" if unit else ""
    if problem["type"] not in ("enum", "literal_error"):
        return ""
    words = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
    near = difflib.get_close_matches(str(problem["input"]), words, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    section: Any = Config
    for part in location[:-1]:
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[str(part)].annotation
        else:  # a name or an index: of a dictionary's values, or a tuple's items
            section = next(inner for inner in reversed(get_args(section)) if inner is not Ellipsis)
    return list(section.model_fields)


def cache_dir() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME/isthmus`, else `~/.cache/isthmus`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"


def cluster_token() -> str | None:
    """The token that nodes started by hand show, and their head expects: `$ISTHMUS_TOKEN`."""
    return os.environ.get(_TOKEN_VARIABLE) or None


def api_key(option: str, given: str | None = None) -> str | None:
    """The key that `option` was `given`, else `$ISTHMUS_API_KEY`. Raises ConfigError, which does not quote it."""
    if given is None:
        option, given = _KEY_VARIABLE, os.environ.get(_KEY_VARIABLE)
    if given is not None and not _KEY.fullmatch(given):
        raise ConfigError(f"{option}: a key is 1 to 512 letters, digits and signs of ASCII, without spaces")
    return given


def with_keys(config: Config, given: Sequence[str]) -> Config:
    """With the keys of `--api-key` and the environment beside those of the file, which says whose its own are.

    All tenants are known then, so that those that sections name are checked here. Raises ConfigError.
    """
    keys = [api_key("--api-key", key) for key in given]
    plain = [key for key in [*keys, api_key("--api-key")] if key is not None]
    known = {key.sha256: key for key in config.auth.keys}
    for digest in map(key_digest, plain):
        known.setdefault(digest, KeyConfig(tenant=DEFAULT_TENANT, sha256=digest))
    tenants = list(dict.fromkeys(key.tenant for key in known.values()))
    for tenant in config.reuse.tenants:
        _check_tenant("reuse.tenants", tenant, tenants, "give auth.keys, or reuse.default for all")
    for tenant in config.auth.tenants:
        _check_tenant("auth.tenants", tenant, tenants, "give auth.keys")
    if not tenants and config.auth.model_fields_set & {"default", "metrics"}:
        raise ConfigError(f"auth.default, auth.metrics: {_NOBODY_KNOWN}; give auth.keys")
    auth = config.auth.model_copy(update={"keys": tuple(known.values())})
    return config.model_copy(update={"auth": auth})


def _check_tenant(option: str, tenant: str, known: Sequence[str], remedy: str) -> None:
    """`known`: who has a key. A name that nobody's key has would have no effect, so it is a mistake. `remedy`: where
    there are no keys."""
    if not known:
        raise ConfigError(f"{option}: {_NOBODY_KNOWN}; {remedy}")
    if tenant not in known:
        near = difflib.get_close_matches(tenant, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; tenants with keys: {', '.join(known)}"
        raise ConfigError(f"{option}: {tenant!r} has no key{hint}")


def key_digest(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def vllm_key() -> str | None:
    """That a vLLM server which runs already asks for: `$VLLM_API_KEY`, where vLLM itself finds it."""
    return os.environ.get("VLLM_API_KEY") or None


def visible_devices() -> str | None:
    """The GPUs that CUDA shows here, `$CUDA_VISIBLE_DEVICES`; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def ray_address() -> str | None:
    """Of the Ray cluster, if one is named: `$RAY_ADDRESS`."""
    return os.environ.get("RAY_ADDRESS") or None


def keep_ray_to_itself() -> None:
    """A Ray that is started by us tells its makers nothing about its use, unless the environment says that it may."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a node process: thread counts are set before torch starts its pools.

    Waiting OpenMP threads sleep instead of spinning, since nodes share the machine's cores. Keys are for the gateway
    alone, and nodes are told the cluster's token in another way, so that what they start does not know it; of what Ray
    sets, only which devices are given to the process goes on.
    """
    hidden = (_KEY_VARIABLE, _TOKEN_VARIABLE, *_RAYS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return inherited | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
