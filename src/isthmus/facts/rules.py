"""The conductor's part of the configuration, with a placement policy of the user's own: `FILE.py:FUNCTION`.

Its file is run once, by the process that decides: the head, or the simulator. The function decides like those in
`core/conductor/policies.py` and must be as pure: the same estimates, the same placement.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from isthmus.config import Config
from isthmus.core.conductor import LinkRule, Rules
from isthmus.core.conductor.policies import POLICIES, Policy
from isthmus.core.cost.transfer import INT8, ZSTD
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_MS, NS_PER_S, Shares, Tenant
from isthmus.facts.facts import bytes_per_s

CODECS = {"none": (), "lossless": (ZSTD,), "int8": (ZSTD, INT8)}
"""Those that a value of `network.compression` allows."""


def rules_of(config: Config) -> Rules:
    """Raises ConfigError for a policy of the user's own that cannot be loaded."""
    make_known(config.policy)
    scheduling = config.scheduling
    return Rules(
        policy=config.policy,
        max_requests=config.limits.max_requests,
        max_attempts=config.limits.max_attempts,
        wait_ms=round(config.limits.wait_s * 1000),
        admission=scheduling.admission,
        reserve=scheduling.reserve,
        balancing_threshold=scheduling.balancing_threshold,
        decode_s=scheduling.decode_s,
        load_limit=scheduling.load_limit,
        codecs=CODECS[config.network.compression],
        ttft_ms=config.slo.ttft_ms,
        tbt_ms=config.slo.tbt_ms,
        links=links_of(config),
        threshold=config.offload.threshold,
        priced=config.offload.routing == "priced",
        cache_mode=config.offload.cache,
        control=config.offload.control == "link",
        convert=config.offload.convert == "auto",
        cool_down_s=config.offload.cool_down_s,
        period_ns=int(config.offload.period_s * NS_PER_S),
        lending=config.lending.policy,
        lending_reserve=config.lending.reserve,
        reuse_selector=config.reuse.selector,
        reuse_packs=config.reuse.kept == "packed",
        reuse_prompts=config.reuse.max_prompts,
        reuse_tokens=config.reuse.min_tokens,
    )


def shares_of(config: Config) -> Shares:
    """Of tenants; none has any where the section auth names neither keys nor tenants."""
    auth = config.auth
    if not (auth.keys or auth.tenants):
        return Shares()
    own = tuple([Tenant(name, auth.of(name).weight) for name in auth.tenants])
    return Shares(own, auth.default.weight)


def links_of(config: Config) -> tuple[LinkRule, ...]:
    """Both directions of each."""
    found: list[LinkRule] = []
    for link in config.links:
        rate, rtt_ns = bytes_per_s(link.gbps, 0), int(link.rtt_ms * NS_PER_MS)
        (one, other) = link.between
        found += [LinkRule(one, other, rate, rtt_ns), LinkRule(other, one, rate, rtt_ns)]
    return tuple(found)


def make_known(name: str) -> None:
    """Puts the function that a policy's name stands for among the known ones. Raises ConfigError when the file cannot
    be read or run, or has no such function."""
    file, colon, function = name.rpartition(":")
    if colon:
        POLICIES[name] = _loaded(Path(file), function)


def _loaded(file: Path, function: str) -> Policy:
    spec = spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"policy: {file} is no Python file here")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code does wrong
        raise ConfigError(f"policy: {file} cannot be run: {type(error).__name__}: {error}") from error
    found: Policy | None = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"policy: {file} has no function {function}")
    return found
