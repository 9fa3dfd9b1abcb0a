"""The one configuration tree: built once from a YAML file and flags, checked at the edge, never written again.

docs/configuration.md explains every option. The environment is read in this module only.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
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
_KEY_VARIABLE, _TOKEN_VARIABLE, _SERVER_VARIABLE = "ISTHMUS_API_KEY", "ISTHMUS_TOKEN", "ISTHMUS_SERVER_KEY"
_RAYS = ("RAY_", "SPT_NOENV", "PYTHONBREAKPOINT")
"""Prefixes of the variables that Ray sets for its workers, its token among them."""
_SECRETS = ("auth", "token")
"""Sections whose values error messages never quote: a key may stand where its digest belongs."""
_BOOL = "true_or_false"
MAX_COMPLAINTS = 20
"""Lines of one error message."""
DEFAULT_TENANT = "default"
"""Tenant of the keys given by `--api-key` and by the environment."""
_NOBODY_KNOWN = "without API keys nobody knows whose a request is"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBERS_OF = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "gbps": "Gbit/s"}
"""Units by the suffix of an option's name."""


def parse_bytes(value: Any) -> int:
    """`536870912`, `2e9`, `512MiB` or `1.5GB` in bytes. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None:
        raise ValueError(f"{value!r} is not a size; write bytes or e.g. 512MiB")
    return int(Decimal(match[1]) * _UNITS[(match[2] or "").lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


MANY_SERVERS = ("dns+http://", "k8s://")
"""Beginnings of entries of `servers` that are looked up, and stand for any number of servers."""
_HOST = r"[\w.-]+|\[[0-9a-fA-F:.]+\]"
_SERVER = re.compile(rf"(https?://(?:{_HOST})(?::\d{{1,5}})?)(?:/v1)?/?", re.ASCII)
_LABEL = r"[A-Za-z0-9][\w./-]*=[A-Za-z0-9][\w.-]*"
_SERVERS = re.compile(
    rf"dns\+http://[\w.-]+:\d{{1,5}}|k8s://[a-z0-9-]+/{_LABEL}(?:,{_LABEL})*:\d{{1,5}}", re.ASCII
)


def server_entry(given: str) -> str:
    """Returns an entry of `servers` in its one spelling: a URL without its path, or a name that is looked up. Raises
    ValueError."""
    text = given if "://" in given else f"http://{given}"
    found = _SERVERS.fullmatch(text)
    entry = found[0] if found else found[1] if (found := _SERVER.fullmatch(text)) else ""
    port = re.search(r":(\d+)$", entry)
    if not entry or (port is not None and not 0 < int(port[1]) < 1 << 16):
        raise ValueError(
            f"{given!r} is no server: write http://HOST:PORT, dns+http://NAME:PORT or k8s://NAMESPACE/LABEL=VALUE:PORT"
        )
    return entry


def _count(value: Any) -> Any:
    """`prefill: 2` is short for `prefill: {count: 2}`."""
    return {"count": value} if isinstance(value, int | float | str) else value


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, defer_build=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        """Drops `x-…` keys (anchors and notes) and empty sections and lists (all of whose lines may be comments)."""
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
        """No option is a boolean, and pydantic would take one for 1 or 0."""
        return _no_flag(value)


def _policy(name: str, known: Sequence[str]) -> str:
    """Accepts a built-in policy, `FILE.py:FUNCTION` or `MODULE:FUNCTION`; functions are loaded by the head."""
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


Server = Annotated[str, AfterValidator(server_entry)]


class PolicyConfig(_Choice):
    name: str

    @field_validator("name")
    @classmethod
    def _is_policy(cls, name: str) -> str:
        return _policy(name, POLICIES)


class AdmissionConfig(_Choice):
    name: Literal["none", "baseline", "early", "predictive", "survival"]


class RoleConfig(_Section):
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
    """A role that is not named has no nodes."""

    prefill: Roles = NO_NODES
    decode: Roles = NO_NODES
    mixed: Roles = NO_NODES
    attention: Roles = NO_NODES


def _tokens(value: Any) -> Any:
    """None for `auto`."""
    return None if value == "auto" else value


Threshold = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_tokens)]


class ClusterConfig(_Section):
    roles: RolesConfig = RolesConfig()
    hardware: str | None = None
    gpus: int | None = Field(None, ge=1, le=64)
    cost: str | dict[str, Any] | None = None
    price: float = Field(1.0, gt=0)


class LinkConfig(_Section):
    between: tuple[str, str]
    gbps: float = Field(gt=0)
    rtt_ms: float = Field(0.0, ge=0, le=10_000)
    emulate: Literal["proxy", "none"] = "proxy"


class OffloadConfig(_Section):
    """A `threshold` of None is solved from the lengths seen, again and again (`auto`)."""

    routing: Literal["threshold", "priced"] = "threshold"
    threshold: Threshold = None
    cache: Literal["scarce", "abundant", "auto"] = "scarce"
    control: Literal["none", "link"] = "link"
    convert: Literal["none", "auto"] = "none"
    cool_down_s: float = Field(60.0, gt=0)
    period_s: float = Field(1.0, gt=0, le=60)


class VllmConfig(_Section):
    """A vLLM server beside each node (docs/vllm.md). A `python` of None is this interpreter."""

    python: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    logs: str | None = None
    attach: str | None = None
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
            raise ValueError(
                "attach: give sockets too, the folder where the server and its node meet, or tcp://HOST:PORT"
            )
        if self.attach is None and self.sockets is not None:
            raise ValueError("sockets: only with attach; a server that is started here is told")
        if self.sockets is not None and "://" in self.sockets:
            found = re.fullmatch(r"tcp://[^/]+:([0-9]{1,5})", self.sockets)
            if found is None or int(found[1]) >= 65535:  # the next one is used too
                raise ValueError("sockets: write a folder, or tcp://HOST:PORT")
            if self.transfer == "pool":
                raise ValueError(
                    "sockets: with transfer: pool server and node share memory through a folder; give one that both "
                    "see, or transfer: nixl"
                )
        if self.attach is not None and (self.python is not None or self.args or self.env or self.logs):
            raise ValueError("attach: python, args, env and logs are for a server that is started here")
        return self


class EngineConfig(_Section):
    """One node's engine. None: decided from the model or the machine."""

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
    policy: str = "none"
    reserve: float = Field(0.1, ge=0, lt=1)
    period_s: float = Field(0.25, gt=0, le=60)

    @field_validator("policy")
    @classmethod
    def _is_policy(cls, name: str) -> str:
        return _policy(name, LENDINGS)


class LimitsConfig(_Section):
    """Limits of requests, waits, bodies, grammars, sessions and HTTP connections. `connections`: None is as many as
    the descriptor limit allows."""

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
    timeout_s: float = Field(600.0, gt=0)
    header_bytes: Bytes = Field(64 * 2**10, ge=1024, le=2**20)
    headers: int = Field(100, ge=1, le=10_000)
    header_s: float = Field(5.0, gt=0)
    body_s: float = Field(30.0, gt=0)
    bodies: Bytes = Field(128 * 2**20, ge=2**20)
    connections: int | None = Field(None, ge=1)


class CacheConfig(_Section):
    dram: Bytes = 0
    ssd: Bytes = 0
    folder: str | None = None
    share: Literal["host", "none"] = "host"


class ReuseConfig(_Section):
    """Reuse of KV beyond the prefix (docs/reuse.md). No dump of a configuration has `tenants`: only the gateway needs
    them."""

    default: Reuse = Reuse.EXACT
    tenants: dict[str, Reuse] = Field(default_factory=dict, exclude=True)
    selector: Literal["cacheblend", "epic"] = "cacheblend"
    kept: Literal["packed", "whole"] = "packed"
    max_prompts: int = Field(1024, ge=1)
    min_tokens: int = Field(700, ge=1)


class NetworkConfig(_Section):
    """Links between nodes. `node_gbps`: None is the hardware's; `handover_gbps`: None shares the node's link."""

    node_gbps: float | None = Field(None, gt=0)
    handover_gbps: float | None = Field(None, gt=0)
    rtt_us: float = Field(66.6, ge=0, le=1_000_000)
    connections: int = Field(2, ge=1, le=64)
    resume_s: float = Field(0.0, ge=0, le=60)
    compression: Literal["none", "lossless", "int8"] = "none"


class TlsConfig(_Section):
    """TLS 1.3 with certificates on both sides, for all sessions of nodes (docs/machines.md)."""

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
    certificate: str | None = None
    key: str | None = None

    @model_validator(mode="after")
    def _both(self) -> HttpsConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are needed, both or none")
        return self


def _listed(value: Any) -> Any:
    """`origins: https://chat.example.com` is short for a list of one."""
    return [value] if isinstance(value, str) else value


class CorsConfig(_Section):
    """`origins`: None is any page where requests need a key, else pages of this machine."""

    origins: Annotated[tuple[str, ...], BeforeValidator(_listed)] | None = None

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
    """One API key: its tenant and its SHA-256 in hexadecimal. The key itself is stored nowhere."""

    tenant: str = Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TenantConfig(_Section):
    """Limits of one tenant (None: no limit), and the weight of its share of full queues and caches."""

    requests_per_s: float | None = Field(None, gt=0, le=1e9)
    tokens_per_s: float | None = Field(None, gt=0, le=1e12)
    burst_s: float = Field(10.0, gt=0, le=3600)
    concurrent: int | None = Field(None, ge=1)
    weight: float = Field(1.0, ge=1e-3, le=1e3)


class AuthConfig(_Section):
    """API keys and limits of tenants. Without keys everybody is served."""

    keys: tuple[KeyConfig, ...] = ()
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    default: TenantConfig = TenantConfig()
    metrics: Literal["none", "tenants"] = "none"

    def of(self, tenant: str) -> TenantConfig:
        """Limits of a tenant, with the defaults for those that it does not set."""
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
    ttft_ms: int | None = Field(None, ge=1)
    tbt_ms: int | None = Field(None, ge=1)


class SchedulingConfig(_Section):
    admission: Annotated[AdmissionConfig, BeforeValidator(_named)] = AdmissionConfig(name="none")
    order: Literal["fcfs", "promise"] = "fcfs"
    chunking: Literal["fixed", "tbt"] = "fixed"
    partial_prefills: int = Field(1, ge=1, le=64)
    reserve: float = Field(0.0, ge=0, lt=1)
    load_limit: float = Field(1.0, gt=0)


class RayConfig(_Section):
    spread: Literal["pack", "strict"] = "pack"


class Config(_Section):
    """A deployment. `model`: None is the default model. No dump of a configuration has `auth`: only the gateway
    needs it."""

    model: str | None = None
    served_model_name: str | None = Field(None, pattern="^[^,]+(,[^,]+)*$")
    tool_format: Literal["auto", "hermes", "llama3", "qwen_coder", "mistral"] = "auto"
    servers: Annotated[tuple[Server, ...], BeforeValidator(_listed)] = ()
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
    def _servers_fit(self) -> Config:
        for option in Config.model_fields if self.servers else ():
            if option in self.model_fields_set - _OF_ROUTERS:
                raise ValueError(
                    f"{option}: is of nodes that Isthmus starts, and servers run already; leave one out"
                )
        return self

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


_OF_ROUTERS = frozenset(
    (
        "servers",
        "host",
        "port",
        "policy",
        "scheduling",
        "slo",
        "limits",
        "auth",
        "cors",
        "https",
        "record",
        "token",
    )
)
"""Options that may stand beside `servers`."""


def load_config(path: Path | None, overrides: dict[str, Any]) -> Config:
    """Reads the file's values, with `overrides` (dotted names, None skipped) on top.

    Raises ConfigError with one line for each mistake: file, line, key and the values that are valid.
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
    """One line for each mistake: those of the command line first, then in the order of the file."""
    found: dict[tuple[int | str, ...], tuple[int, str]] = {}
    for problem in problems:
        place = _place(values, problem["loc"])
        key = problem["loc"] if problem["type"] == "missing" else place
        # An error about several options has no location; its first words name one of them.
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
            return  # not a section: the validation refuses it
        values[key] = inner = dict(inner) if isinstance(inner, dict) else {}
        values = inner
    values[keys[-1]] = value


def _take_as_written(values: Any, document: Document, problems: list[ErrorDetails]) -> bool:
    """Replaces numbers and booleans by their text as written (`007`, `true`) where an option is a text. Returns
    whether there were any."""
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
    """The part of an error's location that the values have: pydantic appends names of union members."""
    for depth, part in enumerate(location):
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return location[:depth]
    return location


def _message(problem: ErrorDetails) -> str:
    return problem["msg"].removeprefix("Value error, ")


def _explain(place: tuple[int | str, ...], problem: ErrorDetails) -> str:
    where = ".".join(str(part) for part in place)
    if not where.isprintable():
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
    """Hint for an option that is one of some words, or a number of a unit."""
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
        else:  # a name or an index: the values of a dictionary, or the items of a tuple
            section = next(inner for inner in reversed(get_args(section)) if inner is not Ellipsis)
    return list(section.model_fields)


def cache_dir() -> Path:
    """Folder of compiled kernels: `$XDG_CACHE_HOME/isthmus`, else `~/.cache/isthmus`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"


def cluster_token() -> str | None:
    """The cluster's token for the head and for nodes started by hand: `$ISTHMUS_TOKEN`."""
    return os.environ.get(_TOKEN_VARIABLE) or None


def server_key_of(given: str | None) -> str | None:
    """The key that servers behind a router ask for: `given` by --server-key, else `$ISTHMUS_SERVER_KEY`."""
    return api_key("--server-key", given, _SERVER_VARIABLE)


def api_key(option: str, given: str | None = None, variable: str = _KEY_VARIABLE) -> str | None:
    """The key `given` by `option`, else the environment's. Raises ConfigError, which never quotes the key."""
    if given is None:
        option, given = variable, os.environ.get(variable)
    if given is not None and not _KEY.fullmatch(given):
        raise ConfigError(f"{option}: a key is 1 to 512 letters, digits and signs of ASCII, without spaces")
    return given


def with_keys(config: Config, given: Sequence[str]) -> Config:
    """Adds the keys of `--api-key` and of the environment to those of the file, for tenant `default`.

    Raises ConfigError for a section that names a tenant without a key: only now are all tenants known.
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
    """Raises ConfigError for a tenant that is not in `known`; `remedy` is the advice if no tenant is known."""
    if not known:
        raise ConfigError(f"{option}: {_NOBODY_KNOWN}; {remedy}")
    if tenant not in known:
        near = difflib.get_close_matches(tenant, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; tenants with keys: {', '.join(known)}"
        raise ConfigError(f"{option}: {tenant!r} has no key{hint}")


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def vllm_key() -> str | None:
    """API key of an attached vLLM server: `$VLLM_API_KEY`, which vLLM itself reads."""
    return os.environ.get("VLLM_API_KEY") or None


class Kubernetes(NamedTuple):
    """How a pod asks its cluster. `folder`: of its service account's token and of the authority's certificate."""

    address: str
    folder: str


SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def kubernetes() -> Kubernetes | None:
    """How to ask the Kubernetes cluster that this process runs in; None outside one."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return (
        Kubernetes(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", SERVICE_ACCOUNT) if host else None
    )


def visible_devices() -> str | None:
    """GPUs that CUDA shows to this process: `$CUDA_VISIBLE_DEVICES`; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def ray_address() -> str | None:
    """Address of the Ray cluster, if one is named: `$RAY_ADDRESS`."""
    return os.environ.get("RAY_ADDRESS") or None


def keep_ray_to_itself() -> None:
    """Switches off Ray's usage reports, unless the environment switches them on."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def child_environment(threads: int) -> dict[str, str]:
    """The environment of a node process: thread counts are set before torch starts its pools.

    Waiting OpenMP threads sleep instead of spinning, since nodes share the machine's cores. API keys and the cluster's
    token are left out, so that programs which a node starts cannot see them; of Ray's variables only the visible
    devices are kept.
    """
    hidden = (_KEY_VARIABLE, _TOKEN_VARIABLE, _SERVER_VARIABLE, *_RAYS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return inherited | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
