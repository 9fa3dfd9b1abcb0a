from __future__ import annotations

import pytest
from msgspec.structs import replace

from isthmus.core.blocks import state_names
from isthmus.core.conductor import (
    BlocksStored,
    Conductor,
    FirstToken,
    LinkRule,
    NodeJoined,
    Paths,
    RequestArrived,
    Route,
    Rules,
)
from isthmus.core.cost import Curve
from isthmus.core.cost.transfer import NONE, ZSTD
from isthmus.core.types import NodeId, RequestId, Role

GB = 1_000_000_000
SLOW, FAST = Paths(network=GB // 2, handover=GB // 2), Paths(network=100 * GB, handover=100 * GB)
CURVE = Curve(kv_token_bytes=100_000, num_layers=32, prefill_token_s=1e-5, decode_fixed_s=1e-2)
"""A token computes in 10 us and takes 200 us on the slow link."""
SLOW_NODE = replace(CURVE, prefill_token_s=1e-3)
NAMES = tuple(range(100))


def route(
    paths: Paths,
    codecs: tuple[str, ...],
    *,
    curve: Curve = CURVE,
    dtype: str = "bfloat16",
    stored: bool = False,
    state_blocks: int = 0,
) -> Route:
    """Of a request of 1,600 tokens on two prefill nodes and one that decodes. `stored`: the first prefill node, busy
    with something else, has its blocks."""
    conductor = Conductor(Rules(policy="mooncake" if stored else "isthmus", codecs=codecs))
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d", Role.DECODE)):
        joined = NodeJoined(
            NodeId(name), role, 1 << 20, 16, curve, paths, 1000, dtype, state_blocks=state_blocks
        )
        conductor.on(joined, 0)
    if stored:
        for depth in (99, 100) if state_blocks else ():
            conductor.on(BlocksStored(NodeId("p0"), state_names(NAMES[depth - 1], state_blocks)), 0)
        conductor.on(BlocksStored(NodeId("p0"), NAMES), 0)
        (first,) = conductor.on(RequestArrived(RequestId("busy"), "", 1000, 1, (1000,)), 0)
        if isinstance(first, Route) and first.prefill != NodeId("p0"):
            conductor.on(RequestArrived(RequestId("more"), "", 2000, 1, (1001,)), 0)
            conductor.on(FirstToken(RequestId("busy"), 1), 0)
    (action,) = conductor.on(RequestArrived(RequestId("a"), "", 1600, 10, NAMES), 0)
    assert isinstance(action, Route)
    return action


def over_a_link(rate: int, num_requests: int, curve: Curve = CURVE) -> list[str]:
    """Codecs of requests that come at once and are prefilled in another cluster; nodes without a cache."""
    links = tuple(LinkRule(one, other, rate) for one, other in (("there", "home"), ("home", "there")))
    conductor = Conductor(Rules(policy="isthmus", codecs=("zstd", "int8"), links=links, threshold=0))
    for name, role, cluster in (("p", Role.PREFILL, "there"), ("d", Role.DECODE, "home")):
        joined = NodeJoined(NodeId(name), role, 1 << 20, 16, curve, Paths(), 0, "bfloat16", cluster)
        conductor.on(joined, 0)
    codecs = []
    for number in range(num_requests):
        (action,) = conductor.on(RequestArrived(RequestId(str(number)), "", 1600, 10, ()), 0)
        assert isinstance(action, Route)
        codecs.append(action.codec)
    return codecs


def test_a_link_between_clusters_is_spared_once_it_owes_more_than_computing_hides() -> None:
    """A prompt computes in 16 ms and has 160 MB: 13 ms at 12 GB/s, 133 ms at 1.2 GB/s."""
    assert over_a_link(12 * GB, 1) == ["none"]
    assert over_a_link(12 * GB // 10, 1) == ["int8"]
    assert over_a_link(12 * GB // 10 * 9, 3)[0] == "none"


def test_what_is_owed_to_others_is_waited_for_and_not_what_is_owed_to_itself() -> None:
    """Each computes in 1.6 s and crosses in 0.32 s: a sixth that comes after five has no more time to hide in."""
    codecs = over_a_link(GB // 2, 6, SLOW_NODE)
    assert codecs == ["none"] * 5 + ["int8"]


@pytest.mark.parametrize(
    ("codecs", "codec"), [((), "none"), (("zstd",), "zstd"), (("zstd", "int8"), "int8")], ids=str
)
def test_a_slow_link_is_spared(codecs: tuple[str, ...], codec: str) -> None:
    assert route(SLOW, codecs).codec == codec


def test_a_link_that_is_faster_than_computing_is_not() -> None:
    assert route(FAST, ("zstd", "int8")).codec == "none"
    assert route(SLOW, ("zstd", "int8"), curve=SLOW_NODE).codec == "none"


def test_nothing_is_encoded_where_links_or_numbers_are_unknown() -> None:
    assert route(Paths(), ("zstd", "int8")).codec == "none"
    assert route(SLOW, ("zstd", "int8"), dtype="").codec == "none"


def test_a_fetch_over_a_slow_link_too() -> None:
    found = route(SLOW, ("zstd",), curve=SLOW_NODE, stored=True)
    assert found.fetch is not None and found.prefill == NodeId("p1")
    assert found.fetch.codec == "zstd", "0.32 s of transfer for a millisecond of computing"
    found = route(FAST, ("zstd",), curve=SLOW_NODE, stored=True)
    assert found.fetch is not None and found.fetch.codec == "none"


def test_a_fetch_with_a_recurrent_state_keeps_every_bit() -> None:
    for state_blocks, codec in ((0, "int8"), (2, "zstd")):
        found = route(SLOW, ("zstd", "int8"), curve=SLOW_NODE, stored=True, state_blocks=state_blocks)
        assert found.fetch is not None and found.fetch.codec == codec


def test_a_slow_link_between_clusters_is_worth_encoding_for() -> None:
    links = (LinkRule("far", "near", GB // 2), LinkRule("near", "far", GB // 2))
    for rules, codec in (
        (Rules(threshold=0, links=links, codecs=(ZSTD,)), ZSTD),
        (Rules(codecs=(ZSTD,)), NONE),
    ):
        conductor, cluster = Conductor(rules), ("near", "far") if rules.links else ("", "")
        for name, role, where in (("d", Role.DECODE, cluster[0]), ("p", Role.PREFILL, cluster[1])):
            conductor.on(NodeJoined(NodeId(name), role, 1 << 20, 16, CURVE, FAST, 1000, "bfloat16", where), 0)
        (sent,) = conductor.on(RequestArrived(RequestId("r"), "", 1600, 10, ()), 0)
        assert isinstance(sent, Route) and sent.codec == codec
