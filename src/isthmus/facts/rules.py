"""The conductor's part of the configuration, with policies of the user's own: `FILE.py:FUNCTION`, or `MODULE:FUNCTION`.

Their file is run once, by the process that decides: the head, or the simulator. A function decides like those in
`core/conductor/policies.py`, or for lending like `isthmus` in `core/conductor/debts.py`, and must be as pure: the same
facts, the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Any

from isthmus.config import Config
from isthmus.core.conductor import LinkRule, Rules
from isthmus.core.conductor.admission import FORECASTS
from isthmus.core.conductor.events import Parameters
from isthmus.core.conductor.lending import POLICIES as LENDINGS
from isthmus.core.conductor.policies import POLICIES
from isthmus.core.cost.transfer import INT8, ZSTD
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_MS, NS_PER_S, Shares, Tenant
from isthmus.facts.facts import bytes_per_s

CODECS = {"none": (), "lossless": (ZSTD,), "int8": (ZSTD, INT8)}
"""Those that a value of `network.compression` allows."""


def rules_of(config: Config) -> Rules:
    """Raises ConfigError for a policy that cannot be loaded, or has no such parameters."""
    scheduling = config.scheduling
    rules = Rules(
        policy=config.policy.name,
        policy_parameters=config.policy.parameters,
        max_requests=config.limits.max_requests,
        max_attempts=config.limits.max_attempts,
        wait_ms=round(config.limits.wait_s * 1000),
        admission=scheduling.admission.name,
        admission_parameters=scheduling.admission.parameters,
        reserve=scheduling.reserve,
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
    make_known(rules)
    return rules


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


def make_known(rules: Rules) -> None:
    """Puts the functions that `FILE.py:FUNCTION` and `MODULE:FUNCTION` stand for in rules among the known ones.

    Raises ConfigError when one cannot be loaded, or does not take the parameters that it is given, and for a name that
    is not known here.
    """
    for option, name, known in own_names(rules):
        known[name] = _loaded(option, *name.rsplit(":", 1))
    if rules.lending != "none":
        _check("lending.policy", rules.lending, LENDINGS, 2)
    _check("policy", rules.policy, POLICIES, 2, rules.policy_parameters)
    _check("scheduling.admission", rules.admission, FORECASTS, 4, rules.admission_parameters)


def own_names(rules: Rules) -> list[tuple[str, str, dict[str, Any]]]:
    """The functions of a user's own that rules name: option, name, and the table where it is to be known."""
    names: list[tuple[str, str, dict[str, Any]]] = [
        ("policy", rules.policy, POLICIES),
        ("lending.policy", rules.lending, LENDINGS),
    ]
    return [each for each in names if ":" in each[1]]


def _loaded(option: str, place: str, function: str) -> Callable[..., Any]:
    try:
        if place.endswith(".py"):
            spec = spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise ConfigError(f"{option}: {place} is no Python file here")
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = import_module(place)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code does wrong
        raise ConfigError(f"{option}: {place} cannot be run: {type(error).__name__}: {error}") from error
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{option}: {place} has no function {function}")
    return found


def _check(
    option: str, name: str, known: Mapping[str, Callable[..., Any] | None], facts: int, given: Parameters = ()
) -> None:
    """Checks that a function is known, takes so many facts by position, and what it is given by name beside them."""
    if name not in known:
        raise ConfigError(f"{option}: {name!r} is not known; known: {', '.join(known)}")
    takes = signature(known[name] or (lambda view, node, now, then: None))  # an admission without a forecast
    try:
        takes.bind(*[None] * facts, **dict(given))
    except TypeError as error:
        own = ", ".join(list(takes.parameters)[facts:])
        raise ConfigError(f"{option}: {name}: {error}; its parameters: {own or 'none'}") from None
