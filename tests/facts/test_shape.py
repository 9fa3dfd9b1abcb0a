"""Which nodes suit a machine, and their threads."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config import Config, load_config
from isthmus.facts import node_threads, places_of, shaped


def nodes(config: Config) -> list[str]:
    return [place.node for place in places_of(config)]


def test_few_cores_are_one_nodes_and_many_are_shared_by_two() -> None:
    for cores in (1, 2, 7):
        config, why = shaped(Config(model="m"), cores)
        assert nodes(config) == ["mixed-0"]
        assert f"all the cores ({cores})" in why and "--prefill 1 --decode 1" in why
    told = Config.model_validate_json(config.model_dump_json(exclude_unset=True))  # as a node process is told
    assert nodes(told) == ["mixed-0"] and told.model == "m"
    config, why = shaped(Config(), 8)
    assert nodes(config) == ["prefill-0", "decode-0"]
    assert why.startswith("8 cores") and "--mixed 1" in why


@pytest.mark.parametrize(
    "given",
    [
        {"roles": {"prefill": 1}},
        {"roles": {"mixed": {"count": 2}}},
        {"clusters": {"one": {"roles": {"mixed": 1}}}},
        {"engine": {"kind": "emulated", "hardware": "h200"}},
        {"engine": {"device": "cuda"}},
        {"placement": "ray"},
    ],
)
def test_what_is_named_or_needs_no_cores_stays(given: dict[str, Any]) -> None:
    config = Config.model_validate(given)
    assert shaped(config, 2) == (config, "")


def test_flags_name_nodes() -> None:
    config = load_config(None, {"roles.prefill.count": 1, "roles.decode.count": None})
    assert shaped(config, 2) == (config, "")
    assert shaped(load_config(None, {"roles.prefill.count": None}), 2)[1]


def test_threads_share_the_cores() -> None:
    asked = [(1, 1), (2, 1), (2, 2), (2, 5), (3, 1), (4, 1), (8, 2), (9, 2), (64, 1)]
    assert [node_threads(*each) for each in asked] == [1, 2, 1, 1, 3, 3, 3, 4, 63]
