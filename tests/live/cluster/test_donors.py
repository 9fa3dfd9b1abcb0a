"""What the head knows of prompts: their tokens, whose they are, and what signatures are made of."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.core.attempts import Assembly, Donor, Route
from isthmus.core.errors import ProtocolError
from isthmus.core.reuse import CACHEBLEND, SIMILAR, similarity
from isthmus.core.types import Job, ModelCard, NodeId, RequestId, Reuse, Sampling
from isthmus.live.cluster.donors import PART_ROWS, DonorTokens, parts_of, scope_of
from isthmus.live.engine.interface import SIGNATURE_BITS
from isthmus.live.peers.messages import Directions

VOCAB_SIZE = PART_ROWS + 100
CARD = ModelCard("m", 1000, VOCAB_SIZE, 0)
TABLE = np.random.default_rng(1).integers(-127, 128, (VOCAB_SIZE, SIGNATURE_BITS)).astype(np.int8)


def job(tokens: list[int], reuse: Reuse = Reuse.SEMANTIC, **fields: str) -> Job:
    name = RequestId(fields.pop("request", "r"))
    return Job(name, tuple(tokens), 1, Sampling(), reuse=reuse, **fields)


def ready() -> DonorTokens:
    donors = DonorTokens(CARD)
    for part in parts_of(TABLE.tobytes()):
        donors.take(part)
    assert donors.ready
    return donors


def test_a_table_comes_in_parts_and_in_order() -> None:
    first, second = parts_of(TABLE.tobytes())
    signer = DonorTokens(CARD)
    with pytest.raises(ProtocolError, match=f"from {PART_ROWS} on follow 0"):
        signer.take(second)
    signer.take(first)
    assert not signer.ready
    signer.take(first)  # another node begins anew
    signer.take(second)
    assert signer.ready
    for wrong in (Directions(VOCAB_SIZE, bytes(SIGNATURE_BITS)), Directions(0, b""), Directions(0, bytes(7))):
        with pytest.raises(ProtocolError):
            signer.take(wrong)


def test_signatures_are_of_distinct_tokens_and_alike_as_prompts_are() -> None:
    signer = ready()
    one, other = list(range(200)), list(range(3000, 3200))
    assert signer.sign(one) == signer.sign(one[::-1] * 3) and len(signer.sign(one)) == SIGNATURE_BITS // 8
    alike = similarity(signer.sign(one), signer.sign(one[:190] + other[:10]))
    assert SIMILAR < alike < 1
    assert similarity(signer.sign(one), signer.sign(other)) < 0.3


def test_what_the_conductor_is_told_says_nothing_of_an_exact_request() -> None:
    assert ready().content_of(job([1, 2, 3], Reuse.EXACT)) is None
    cannot = DonorTokens(ModelCard("m", 1000, VOCAB_SIZE, 0, no_reuse="its states hold at one position only"))
    assert cannot.ready and cannot.content_of(job([1, 2, 3])) is None


def test_tenants_and_salts_are_scopes_and_pieces_of_other_salts_never_match() -> None:
    scopes = {scope_of(tenant, salt) for tenant in ("", "a", "b") for salt in ("", "a", "b")}
    assert len(scopes) == 9
    donors, tokens = ready(), [token % 50 for token in range(500)]
    contents = [
        donors.content_of(job(tokens, tenant=t, salt=s)) for t, s in (("a", "x"), ("b", "x"), ("a", "y"))
    ]
    assert len({each.scope for each in contents if each is not None}) == 3
    pieces = [set(each.pieces) for each in contents if each is not None]
    assert pieces[0] == pieces[1] and not pieces[0] & pieces[2]
    assert contents[0] == donors.content_of(job(tokens, tenant="a", salt="x"))


def test_tokens_of_the_blocks_that_are_needed_go_with_a_task() -> None:
    donors = ready()
    donors.block_size = 4
    donors.keep(job(list(range(20)), request="d", salt="x"))
    route = Route(RequestId("r"), 1, NodeId("n"), NodeId("n"))
    assert donors.of(route, job([1])) == ()
    assembly = Assembly(CACHEBLEND, (Donor(RequestId("d"), (b"0", b"1", b"2"), 1),))
    routed = Route(RequestId("r"), 1, NodeId("n"), NodeId("n"), assembly=assembly)
    assert donors.of(routed, job([1], salt="x")) == (tuple(range(4, 12)),)
    with pytest.raises(AssertionError, match="another tenant"):
        donors.of(routed, job([1], salt="y"))
    donors.drop(RequestId("d"))
    assert not donors._kept


def test_who_left_before_all_was_told_is_asked_no_more() -> None:
    donors = DonorTokens(CARD)
    donors.asked = NodeId("a")
    donors.left(NodeId("b"))
    assert donors.asked == "a"
    donors.left(NodeId("a"))
    assert donors.asked is None
