"""Prompts that are assembled from others': when, from which, on which node; and when not."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from isthmus.core.conductor import Remember, RequestArrived, Route, Unremember
from isthmus.core.cost import Curve
from isthmus.core.reuse import CACHEBLEND, EPIC, MEAN, SEMANTIC
from isthmus.core.types import NodeId, RequestId, Reuse, Role, Tier

from .cluster import BLOCK_SIZE, MS
from .readers import LEAST, RULES, Readers, names_of

LAYERS = 24
DEEP = Curve(
    kv_token_bytes=250, num_layers=LAYERS, prefill_token_s=1e-3, decode_fixed_s=10e-3, decode_context_s=1e-6
)
"""A prompt token takes 1 ms, a block 1 ms from node to node."""
ONE, OTHER, FAR = bytes([0b11110000] * 64), bytes([0b11110001] * 64), bytes([0b00001111] * 64)
"""Signatures: the second is like the first (an eighth of the bits differ: 0.92), the third is its opposite."""


def text(seed: int, count: int) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple([rng.randrange(1, 5000) for _ in range(count)])


A, B, C = text(1, 200), text(2, 200), text(3, 200)
HEAD, QUESTION = text(4, 12), text(5, 20)


def cluster(roles: str = "m", **fields: object) -> Readers:
    """A node for each letter: mixed, prefill or decode."""
    some = Readers(msgspec.structs.replace(RULES, **fields))
    for number, letter in enumerate(roles):
        role = {"m": Role.MIXED, "p": Role.PREFILL, "d": Role.DECODE}[letter]
        some.join(f"{letter}{number}", role, 4000, cost=DEEP, cache_blocks=500, reuse_layers=LAYERS)
    return some


def read(some: Readers, request: str, *tokens: tuple[int, ...], **fields: object) -> Route:
    """To its end."""
    route = some.reads(request, sum(tokens, ()), **fields)  # type: ignore[arg-type]
    assert route is not None
    some.through(request)
    some.end(request)
    return route


def test_the_same_passages_in_another_order() -> None:
    some = cluster()
    assert read(some, "first", HEAD, A, B, QUESTION).assembly is None
    found = read(some, "second", text(6, 8), B, A, QUESTION).assembly
    assert found is not None and found.selection == CACHEBLEND
    assert [donor.request for donor in found.donors] == ["first"]
    assert found.num_reused > 120 and found.num_layers == LAYERS and found.packing is None
    some.drain()


def test_passages_of_several_prompts() -> None:
    some = cluster(reuse_selector="epic")
    read(some, "one", A, QUESTION)
    read(some, "two", B, QUESTION)
    read(some, "three", C, QUESTION)
    found = read(some, "all", HEAD, C, A, B, text(7, 30)).assembly
    assert found is not None and found.selection == EPIC
    assert sorted(donor.request for donor in found.donors) == ["one", "three", "two"]
    passed = sum(max(0, each.count - EPIC.first) for each in found.passages)
    assert passed < found.num_reused <= passed + 3 * 2 * MEAN, "with what is beyond their ends"
    assert found.num_reused < 3 * (len(A) - EPIC.first) + MEAN


def test_a_prompt_that_is_alike_is_put_together_and_packed() -> None:
    some = cluster("pd")
    read(some, "first", text(8, 200), reuse=Reuse.SEMANTIC, signature=ONE)
    route = read(some, "second", text(9, 200), reuse=Reuse.SEMANTIC, signature=OTHER)
    found = route.assembly
    assert found is not None and found.selection == SEMANTIC and not found.passages
    assert found.packing is not None and found.packing.num_dropped > 0
    assert 0.85 * 200 < found.num_reused < 0.95 * 200, "as many as the signature says are alike"
    assert (route.prefill, route.decode) == ("p0", "d1")


def test_all_of_it_is_kept_where_the_operator_wants_that() -> None:
    some = cluster("pd", reuse_packs=False)
    read(some, "first", text(8, 200), reuse=Reuse.SEMANTIC, signature=ONE)
    found = read(some, "second", text(9, 200), reuse=Reuse.SEMANTIC, signature=OTHER).assembly
    assert found is not None and found.selection == SEMANTIC and found.packing is None


def test_what_is_not_alike_takes_the_way_of_others_with_the_same_text() -> None:
    some = cluster()
    read(some, "first", HEAD, A, B, QUESTION, reuse=Reuse.SEMANTIC, signature=FAR)
    found = read(some, "second", B, A, QUESTION, reuse=Reuse.SEMANTIC, signature=ONE).assembly
    assert found is not None and found.selection == CACHEBLEND
    assert read(some, "third", text(10, 200), reuse=Reuse.SEMANTIC, signature=ONE[::-1]).assembly is None


@pytest.mark.parametrize("reuse", [Reuse.CHUNKS, Reuse.SEMANTIC])
def test_other_scopes_do_not_exist(reuse: Reuse) -> None:
    """The same words, of another tenant: routed as if nobody had ever asked anything."""
    some, alone = cluster("pd"), cluster("pd")
    read(some, "first", HEAD, A, B, QUESTION, reuse=Reuse.SEMANTIC, signature=ONE)
    routes = [
        each.reads("r", (*B, *A, *QUESTION), reuse, salt="another", signature=ONE) for each in (some, alone)
    ]
    assert routes[0] is not None and routes[1] is not None and routes[0].assembly is None
    assert msgspec.structs.replace(routes[0], work_ns=0) == msgspec.structs.replace(routes[1], work_ns=0)


def test_without_a_good_donor_the_route_is_the_one_without_the_header() -> None:
    """Byte for byte: nothing like it, too short, or no gain."""
    asks, asks_not = cluster("ppd"), cluster("ppd")
    prompts = [
        (HEAD + A + B, ONE),
        (text(11, 300), FAR),
        (B[:40] + QUESTION[:19], ONE),
        (text(12, LEAST - 1), ONE),
    ]
    for number, (tokens, signature) in enumerate(prompts):
        found = [
            each.reads(f"r{number}", tokens, reuse, signature=signature)
            for each, reuse in ((asks, Reuse.SEMANTIC), (asks_not, Reuse.EXACT))
        ]
        assert msgspec.json.encode(found[0]) == msgspec.json.encode(found[1])
        for each in (asks, asks_not):
            each.through(f"r{number}")


def test_a_short_rest_is_computed() -> None:
    """What counts is what is not in the cache anyway."""
    for least in (len(B), len(B) + 1):
        some = cluster(reuse_tokens=least)
        read(some, "first", HEAD, A, B, QUESTION)
        read(some, "prefix", C, C)
        assert (read(some, "second", C, C, B).assembly is None) == (len(B) < least)


def test_the_next_turn_of_a_conversation_has_a_prefix_and_no_donor() -> None:
    """All that the one before has is in the cache as it is."""
    some = cluster()
    turn = HEAD + A + B + C
    read(some, "first", turn, reuse=Reuse.SEMANTIC, signature=ONE)
    route = read(some, "second", turn, text(14, 90), reuse=Reuse.SEMANTIC, signature=ONE)
    assert route.num_cached == len(turn) // BLOCK_SIZE and route.assembly is None


def test_donors_come_from_other_nodes_and_prompts_go_where_most_of_them_is() -> None:
    some = cluster("ppd")
    view = some.conductor.view
    first = read(some, "first", HEAD, A, B, C, QUESTION)
    there, other = first.prefill, NodeId("p1" if first.prefill == "p0" else "p0")
    route = some.reads("second", (*C, *B, *A, *QUESTION))
    assert route is not None and route.prefill == there and route.assembly is not None
    assert route.assembly.donors[0].fetch is None
    view.nodes[there].free_ns = some.now + 10_000 * MS
    route = some.reads("third", (*B, *C, *A, *QUESTION))
    assert route is not None and route.prefill == other and route.assembly is not None
    fetch = route.assembly.donors[0].fetch
    assert fetch is not None and fetch.source == there and fetch.until_ns > some.now
    [copy] = view.requests[RequestId("third")].copies
    assert copy.num_bytes == (fetch.stop - fetch.start) * 1000
    some.fetch_finished("third")
    assert not view.requests[RequestId("third")].copies
    view.nodes[there].free_ns -= 10_000 * MS
    some.drain()


def test_what_was_assembled_is_no_donor_and_gets_no_names() -> None:
    some = cluster()
    read(some, "first", HEAD, A, B, QUESTION)
    route = some.reads("second", (*B, *A, *C[:40]))
    assert route is not None and route.assembly is not None
    node = some.conductor.view.nodes[NodeId("m0")]
    names = names_of(some.tokens[RequestId("second")], "s")
    assert some.conductor.view.index.match(names, node.bit)[1] == [(0, node.bit)], "nobody counts on its blocks"
    some.through("second")
    assert list(some.remembered) == ["first"]


def test_a_further_attempt_is_exact_and_then_a_donor() -> None:
    some = cluster("mm")
    read(some, "first", HEAD, A, B, QUESTION)
    route = some.reads("second", (*B, *A, *QUESTION))
    assert route is not None and route.assembly is not None
    [again] = [action for action in some.fail("second", 1) if isinstance(action, Route)]
    assert again.assembly is None and again.attempt == 2
    some.first_token("second", 2)
    assert list(some.remembered) == ["first", "second"]
    some.drain()


def test_a_donor_nobody_has_is_forgotten() -> None:
    some = cluster()
    read(some, "first", HEAD, A, B, QUESTION)
    names = names_of(some.tokens[RequestId("first")], "s")
    some.evict("m0", *names[55:])
    found = some.reads("second", (*text(15, 8), *A, *QUESTION))
    assert found is not None and found.assembly is not None, "the part of it that is there will do"
    assert len(found.assembly.donors[0].names) <= 55
    some.evict("m0", *names[:55])
    actions = some.on(RequestArrived(RequestId("x"), "", 8, 1, ()))
    assert not any(isinstance(action, Unremember) for action in actions), "who does not ask finds nothing out"
    found = some.reads("third", (*text(16, 8), *A, *QUESTION))
    assert found is not None and found.assembly is None
    assert list(some.remembered) == []


def test_a_donor_is_forgotten_whose_beginning_alone_is_left() -> None:
    """All prompts begin so, and whoever needs that has it."""
    some = cluster()
    read(some, "first", HEAD, A, B, QUESTION)
    some.evict("m0", *names_of(some.tokens[RequestId("first")], "s")[len(HEAD) // BLOCK_SIZE :])
    assert some.reads("second", (*HEAD, *B, *A, *QUESTION)).assembly is None  # type: ignore[union-attr]
    assert list(some.remembered) == []


def test_few_are_remembered_those_of_use_last() -> None:
    some = cluster(reuse_prompts=2)
    read(some, "one", A, QUESTION)
    read(some, "two", B, QUESTION)
    read(some, "uses one", HEAD, A, QUESTION)
    read(some, "three", C, QUESTION)
    assert list(some.remembered) == ["one", "three"]


def test_the_same_prompt_again_is_the_same_donor() -> None:
    some = cluster()
    read(some, "one", A, B)
    read(some, "again", A, B)
    read(some, "one more word", A, B, text(17, 2))
    assert list(some.remembered) == ["one"]


def test_a_request_that_bears_a_name_again_takes_its_place() -> None:
    some = cluster()
    read(some, "one", A, B)
    some.ended.clear()
    for kept in (some.arrived, some.routes):
        kept.pop(RequestId("one"), None)
    some.tokens[RequestId("one")] = (*C, *B)
    route = some.reads("one", (*C, *HEAD, *text(18, 100)))
    assert route is not None
    some.first_token("one")
    assert [type(action) for action in some.log[-1][2]] == [Unremember, Remember]


@pytest.mark.parametrize("field", ["reuse_layers", "capacity_tokens", "network"])
def test_where_it_cannot_be_it_is_not(field: str) -> None:
    """No engine for it, no room for donors beside the prompt, no way to get them."""
    some = cluster("")
    paths = some.paths if field != "network" else msgspec.structs.replace(some.paths, network=0)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        some.join(
            name,
            role,
            500 if field == "capacity_tokens" else 4000,
            cost=DEEP,
            paths=paths,
            cache_blocks=500,
            reuse_layers=0 if field == "reuse_layers" else LAYERS,
        )
    first = read(some, "first", HEAD, A, B, QUESTION)
    if field == "network":
        some.conductor.view.nodes[first.prefill].free_ns = some.now + 10_000 * MS
    route = some.reads("second", (*B, *A, *QUESTION))
    assert route is not None and route.assembly is None


def test_reading_from_disk_counts() -> None:
    """Where the donor lies on a slow disk nothing is gained."""
    slow = msgspec.structs.replace(cluster("").paths, disk=2_000_000)
    for paths, is_assembled in ((slow, True), (msgspec.structs.replace(slow, disk=100_000), False)):
        some = cluster("")
        some.join("m", Role.MIXED, 4000, cost=DEEP, paths=paths, cache_blocks=500, reuse_layers=LAYERS)
        read(some, "first", HEAD, A, B, C, QUESTION)
        some.store("m", *names_of(some.tokens[RequestId("first")], "s"), tier=Tier.DISK)
        route = some.reads("second", (*C, *B, *A, *QUESTION))
        assert route is not None and (route.assembly is not None) == is_assembled


def test_two_clusters_keep_to_themselves() -> None:
    """Donors of the cluster that prefills alone; nothing is assembled that another cluster decodes."""
    some = cluster("")
    for name, role, where in (("p", Role.PREFILL, "far"), ("m", Role.MIXED, "near")):
        some.join(name, role, 4000, cost=DEEP, cache_blocks=500, cluster=where, reuse_layers=LAYERS)
    read(some, "first", HEAD, A, B, QUESTION)
    some.store("p", *names_of(text(20, 300), "s"))
    assert read(some, "second", B, A, QUESTION).assembly is not None


@pytest.mark.parametrize("seed", range(6))
def test_many_readers_and_a_cache_that_forgets(seed: int) -> None:
    """Documents in any order, of two tenants, with nodes that come and go. Judged route by route."""
    rng, some = Random(seed), cluster("ppmd")
    documents = [text(100 + number, rng.randrange(150, 300)) for number in range(6)]
    living, told = list[str](), set[str]()
    for number in range(150):
        chosen = rng.sample(documents, rng.randrange(1, 4))
        tokens = (
            *HEAD,
            *(token for each in chosen for token in each),
            *text(1000 + number, rng.randrange(4, 40)),
        )
        reuse = rng.choice(list(Reuse))
        signature = bytes([1 << rng.randrange(8)] * 64)
        name = f"r{number}"
        if some.reads(name, tokens, reuse, salt=rng.choice("ab"), signature=signature) is not None:
            living.append(name)
        while len(living) > rng.randrange(6):
            chance = rng.random()
            other = living[rng.randrange(len(living))]
            if chance < 0.1 and RequestId(other) in some.prefilling:
                some.fail(other, some.routes[RequestId(other)].attempt)
            elif RequestId(other) in some.prefilling:
                some.first_token(other, some.routes[RequestId(other)].attempt)
                told.add(other)
            else:
                if RequestId(other) in some.routes:
                    some.end(other)
                living.remove(other)
        if number % 10 == 9:
            node = rng.choice(sorted(some.stored))
            names = sorted(some.stored[node], key=str)
            some.evict(node, *rng.sample(names, len(names) // 3))
        if number % 40 == 39:
            node = rng.choice(["p0", "p1"])
            some.leave(node)
            some.join(node, Role.PREFILL, 4000, cost=DEEP, cache_blocks=500, reuse_layers=LAYERS)
        living = [each for each in living if RequestId(each) in some.routes]
    assert some.num_assembled > 10 and told
    some.drain()
