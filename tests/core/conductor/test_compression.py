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


@pytest.mark.parametrize(
    ("rate", "curve", "codecs"),
    [
        (
            12 * GB,
            CURVE,
            ["none"],
        ),  # a prompt computes in 16 ms and has 160 MB: 13 ms at 12 GB/s, 133 at 1.2 GB/s
        (12 * GB // 10, CURVE, ["int8"]),
        (12 * GB // 10 * 9, CURVE, ["none", ...]),
        # Each computes in 1.6 s and crosses in 0.32 s: a sixth after five has no more time to hide in.
        (GB // 2, SLOW_NODE, ["none"] * 5 + ["int8"]),
    ],
)
def test_a_link_between_clusters_is_spared_once_it_owes_more_than_computing_hides(
    rate: int, curve: Curve, codecs: list[object]
) -> None:
    """What is owed to others is waited for, and not what is owed to itself."""
    found = over_a_link(rate, len(codecs), curve)
    assert all(one == other for one, other in zip(found, codecs, strict=True) if other is not ...)


@pytest.mark.parametrize(
    ("paths", "codecs", "curve", "dtype", "codec"),
    [
        (SLOW, (), CURVE, "bfloat16", "none"),
        (SLOW, ("zstd",), CURVE, "bfloat16", "zstd"),
        (SLOW, ("zstd", "int8"), CURVE, "bfloat16", "int8"),
        (FAST, ("zstd", "int8"), CURVE, "bfloat16", "none"),
        (SLOW, ("zstd", "int8"), SLOW_NODE, "bfloat16", "none"),  # the link is faster than computing
        (Paths(), ("zstd", "int8"), CURVE, "bfloat16", "none"),  # nothing is known of links
        (SLOW, ("zstd", "int8"), CURVE, "", "none"),
    ],
)
def test_a_hand_over_is_encoded_on_a_link_slower_than_computing(
    paths: Paths, codecs: tuple[str, ...], curve: Curve, dtype: str, codec: str
) -> None:
    assert route(paths, codecs, curve=curve, dtype=dtype).codec == codec


@pytest.mark.parametrize(
    ("paths", "codecs", "state_blocks", "codec"),
    [
        (SLOW, ("zstd",), 0, "zstd"),  # 0.32 s of transfer for a millisecond of computing
        (FAST, ("zstd",), 0, "none"),
        (SLOW, ("zstd", "int8"), 0, "int8"),
        (SLOW, ("zstd", "int8"), 2, "zstd"),  # of a recurrent state every bit is kept
    ],
)
def test_a_fetch_is_encoded_on_a_slow_link(
    paths: Paths, codecs: tuple[str, ...], state_blocks: int, codec: str
) -> None:
    found = route(paths, codecs, curve=SLOW_NODE, stored=True, state_blocks=state_blocks)
    assert found.fetch is not None and found.prefill == NodeId("p1") and found.fetch.codec == codec
