"""Generated workloads: the distributions asked for, prefixes shared as asked, the same ones every time."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ConfigError
from isthmus.core.reuse import similarity
from isthmus.core.types import Reuse
from isthmus.lab.sim.workloads import Request, Workload, generate

PLAIN = "poisson:rate=8,num=4000,input=1024,output=128"
FEW = "few=0.1,few_input=9,few_output=3"
DOCUMENTS = (
    "poisson:rate=8,num=300,input=40,output=12,block_size=16,prefixes=2,prefix_tokens=70,documents=20,"
    "document_tokens=uniform(low=100,high=200),retrieved=4"
)


def gaps_s(workload: Workload) -> list[float]:
    times = [0, *(request.arrival_ns for request in workload.requests)]
    return [(after - before) / 1e9 for before, after in pairwise(times)]


def check_blocks(workload: Workload) -> None:
    """As in a published trace: one id per block, and an id always has the same blocks before it."""
    before: dict[int, tuple[int, ...]] = {}
    for request in workload.requests:
        assert len(request.blocks) == -(-request.num_tokens // workload.block_size)
        for position, block in enumerate(request.blocks):
            assert before.setdefault(block, request.blocks[:position]) == request.blocks[:position]


def test_a_plain_workload() -> None:
    workload = generate(PLAIN)
    assert (workload.name, workload.block_size, len(workload.requests)) == (PLAIN, 512, 4000)
    assert {(each.num_tokens, each.output_tokens, each.blocks) for each in workload.requests} == {
        (1024, 128, ())
    }
    gaps = gaps_s(workload)
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert gaps_s(generate("even:rate=4,num=8,input=1,output=1")) == [0.25] * 8


def test_a_mapping_says_the_same_as_a_line() -> None:
    fields: dict[str, Any] = {"arrivals": "poisson", "rate": 8, "num": 4000, "input": 1024, "output": 128}
    assert generate(fields) == generate(PLAIN)
    drawn = generate(fields | {"input": "uniform(low=1, high=9)"})
    assert (
        drawn.requests
        == generate("poisson: rate=8, num=4000, input=uniform(low=1,high=9), output=128").requests
    )


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_bursty_arrivals_have_the_variation_asked_for(cv: float) -> None:
    gaps = gaps_s(generate(f"gamma:rate=20,cv={cv},num=20000,input=1,output=1"))
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(cv / 20, rel=0.05)


def lengths(distribution: str) -> list[int]:
    return sorted(
        each.num_tokens for each in generate(f"even:rate=1,num=20000,input={distribution},output=1").requests
    )


def test_distributions_of_lengths() -> None:
    """The truncated one is that of Prefill-as-a-Service: mean 27,486 and P90 62,410."""
    by_mean = lengths("lognormal(mean=2000,sigma=0.8)")
    assert statistics.mean(by_mean) == pytest.approx(2000, rel=0.03)
    assert by_mean[10_000] == pytest.approx(2000 * 2.718281828 ** (-(0.8**2) / 2), rel=0.03)
    drawn = lengths("lognormal(p50=900,p99=8000)")
    assert drawn[10_000] == pytest.approx(900, rel=0.03)
    assert drawn[19_800] == pytest.approx(8000, rel=0.1)
    assert lengths("lognormal(p50=900,p99=8000,max=8192)") == [min(each, 8192) for each in drawn]
    assert set(lengths("uniform(low=3,high=6)")) == {3, 4, 5, 6}
    exponential = lengths("exponential(mean=300)")
    assert statistics.mean(exponential) == pytest.approx(300, rel=0.03)
    assert exponential[0] >= 1
    truncated = lengths("truncated_lognormal(mu=9.9,sigma=1,min=128,max=131072)")
    assert truncated[0] >= 128 and truncated[-1] <= 131072
    assert statistics.mean(truncated) == pytest.approx(27_486, rel=0.03)
    assert truncated[18_000] == pytest.approx(62_410, rel=0.03)


def test_requests_share_prefixes_as_often_as_zipf_says() -> None:
    workload = generate("poisson:rate=8,num=9000,input=600,output=9,prefixes=4,zipf=1,prefix_tokens=1100")
    check_blocks(workload)
    assert {each.num_tokens for each in workload.requests} == {1700}
    # The third block holds the end of the prefix and the start of the input: nobody shares it.
    assert len({each.blocks[2] for each in workload.requests}) == 9000
    shares = Counter(each.blocks[:2] for each in workload.requests).most_common()
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    expected = [9000 / rank / harmonic for rank in (1, 2, 3, 4)]
    assert [count for _, count in shares] == pytest.approx(expected, rel=0.06)


def test_each_turn_goes_on_from_all_that_was_said() -> None:
    workload = generate("poisson:rate=2,num=6000,input=300,output=100,turns=4,think_s=20,block_size=64")
    check_blocks(workload)
    assert [each.arrival_ns for each in workload.requests] == sorted(
        each.arrival_ns for each in workload.requests
    )
    chats: dict[int, list[Request]] = {}
    for request in workload.requests:
        chats.setdefault(request.blocks[0], []).append(request)
    for turns in chats.values():
        assert [each.num_tokens for each in turns] == [300 + 400 * turn for turn in range(len(turns))]
    # What began early had time to end.
    ended = list(chats.values())[: len(chats) // 2]
    assert statistics.mean(len(turns) for turns in ended) == pytest.approx(4, rel=0.1)
    thinking = [(b.arrival_ns - a.arrival_ns) / 1e9 for turns in ended for a, b in pairwise(turns)]
    assert statistics.mean(thinking) == pytest.approx(20, rel=0.1)
    late = [each.arrival_ns for each in workload.requests[3000:]]
    assert 1e9 * len(late) / (late[-1] - late[0]) == pytest.approx(2, rel=0.1)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 3), st.floats(1, 6))
def test_block_ids_form_a_forest(block_size: int, tokens: int, prefixes: int, turns: float) -> None:
    shared = f",prefixes={prefixes},prefix_tokens={tokens}" if prefixes else ""
    check_blocks(
        generate(
            f"poisson:rate=3,num=60,input=uniform(low=1,high={tokens}),output=exponential(mean={tokens}),"
            f"turns={turns + 0.01},think_s=1,block_size={block_size}{shared}"
        )
    )


def test_what_is_drawn_for_one_purpose_leaves_the_others_alone() -> None:
    first = generate("poisson:rate=8,num=300,input=exponential(mean=99),output=5").requests
    other = generate("poisson:rate=8,num=300,input=exponential(mean=99),output=exponential(mean=9)").requests
    assert [(a.arrival_ns, a.num_tokens) for a in first] == [(b.arrival_ns, b.num_tokens) for b in other]
    reseeded = generate("poisson:rate=8,num=300,input=exponential(mean=99),output=5,seed=1").requests
    assert [a.arrival_ns for a in first] != [b.arrival_ns for b in reseeded]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("poison:rate=1", "arrivals 'poison' are not known; known: poisson, gamma, even"),
        ("poisson", "poisson needs rate too; write e.g. rate=8"),
        ("poisson:rate=8,num=1,input=1", "poisson needs output too"),
        ("poisson:rat=8", r"'rat' is not known \(did you mean rate\?\); known names: rate, num, input"),
        ("poisson:rate", "'rate' is not name=value; known names: rate, num"),
        ("poisson:rate=8,,num=1", "'' is not name=value"),
        (f"{PLAIN},rate=9", "twice"),
        (f"{PLAIN},cv=2", "cv belongs to gamma arrivals"),
        ("gamma:rate=8,num=1,input=1,output=1", "gamma needs cv too"),
        (f"{PLAIN},prefixes=3", "prefixes needs prefix_tokens too"),
        (f"{PLAIN},prefix_tokens=3", "prefix_tokens needs prefixes too"),
        (f"{PLAIN},zipf=1", "zipf needs prefixes too"),
        (f"{PLAIN},turns=2", "turns needs think_s too"),
        (f"{PLAIN},turns=0.5,think_s=1", "turns: '0.5' is not a number of at least 1"),
        (f"{PLAIN},seed=-1", "seed: '-1' is not a whole number"),
        ("poisson:rate=0", "rate: '0' is not a number above 0"),
        ("poisson:rate=nan", "rate: 'nan' is not a number above 0"),
        ("poisson:rate=inf", "rate: 'inf' is not a number"),
        ("poisson:rate=fast", "rate: 'fast' is not a number"),
        ("poisson:num=1.5", "num: '1.5' is not a whole number above 0"),
        ("poisson:num=0", "num: '0' is not a whole number above 0"),
        ("poisson:input=-3", "input: '-3' is neither a whole number above 0 nor one of uniform"),
        ("poisson:input=0", "input: '0' is neither"),
        ("poisson:input=lognormal", "input: 'lognormal' is neither"),
        ("poisson:input=pareto(mean=3)", "no distribution 'pareto'; known: uniform"),
        ("poisson:input=lognormal(mean=3)", "lognormal takes mean=,sigma= or p50=,p99=, and max="),
        ("poisson:input=lognormal(mean=3,sigma=1,p50=2)", "lognormal takes"),
        ("poisson:input=lognormal()", "'' is not name=number"),
        ("poisson:input=lognormal(mean=x,sigma=1)", "'mean=x' is not name=number"),
        ("poisson:input=lognormal(mean=nan,sigma=1)", "mean of nan is not a number from 0 up"),
        ("poisson:input=lognormal(mean=3,mean=4)", "mean twice"),
        ("poisson:input=lognormal(mean=0.5,sigma=1)", "mean=0.5 is below 1 token"),
        ("poisson:input=lognormal(p50=9,p99=8)", "not 1 <= p50 <= p99"),
        ("poisson:input=lognormal(p50=9,p99=80,max=0)", "max=0 is not a whole number above 0"),
        ("poisson:input=uniform(low=0,high=8)", "not whole numbers with 1 <= low <= high"),
        ("poisson:input=uniform(low=1.5,high=8)", "not whole numbers"),
        ("poisson:input=exponential(mean=0)", "mean=0 is below 1 token"),
        ("poisson:input=truncated_lognormal(mu=9.9,sigma=1,min=128)", "takes mu=,sigma=,min=,max="),
        ("poisson:input=truncated_lognormal(mu=9.9,sigma=0,min=128,max=1000)", "a sigma above 0"),
        ("poisson:input=truncated_lognormal(mu=9.9,sigma=1,min=2000,max=1000)", "1 <= min < max"),
        ("poisson:input=truncated_lognormal(mu=20,sigma=1,min=1,max=8)", "lies between min and max"),
        (f"{PLAIN},few=0.1,few_output=3", "few needs few_input"),
        (f"{PLAIN},{FEW},turns=2,think_s=1", "neither prefixes nor turns"),
        (f"{PLAIN},few=1,few_input=9,few_output=3", "between 0 and 1"),
        (f"{DOCUMENTS},turns=2,think_s=1", "documents go with neither few nor turns"),
        (f"{DOCUMENTS},reuse=all", "reuse: 'all' is none of exact, chunks, semantic"),
        (f"{DOCUMENTS},paraphrases=0.3", "paraphrases needs alike too"),
        (f"{DOCUMENTS},alike=1", "is not a number between 0 and 1"),
        (DOCUMENTS.replace("documents=20", "documents=3"), "there are not 4 of 3 documents"),
        (f"{PLAIN},reuse=chunks", "reuse needs documents too"),
        ({"rate": 8}, "arrivals '' are not known"),
        ({"arrivals": "poisson", "rate": True}, "rate: 'True' is not a number"),
        ({"arrivals": "poisson", "input": None}, "input: 'None' is neither"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(spec: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        generate(spec)
    assert str(raised.value).startswith("workload: ")
    assert "\n" not in str(raised.value)


def test_few_requests_may_be_very_long_and_the_others_stay_as_they_are() -> None:
    plain = generate("poisson:rate=8,num=4000,input=uniform(low=100,high=300),output=20")
    mixed = generate(
        "poisson:rate=8,num=4000,input=uniform(low=100,high=300),output=20,few=0.02,few_input=60000,few_output=1000"
    )
    few = [each for each in mixed.requests if each.num_tokens == 60000]
    assert all(each.output_tokens == 1000 for each in few) and 40 < len(few) < 130
    assert [each.arrival_ns for each in plain.requests] == [each.arrival_ns for each in mixed.requests]


def test_prompts_of_documents_have_blocks_as_any_and_pieces_of_them() -> None:
    """Some have the first document in common too; and all have the pieces of what they have in common."""
    workload = generate(f"{DOCUMENTS},reuse=chunks")
    check_blocks(workload)
    begun: set[tuple[int, ...]] = set()
    owners: Counter[bytes] = Counter()
    for request in workload.requests:
        begun.add(request.blocks[:4])
        content = request.content
        assert content is not None and content.reuse is Reuse.CHUNKS
        assert content.stops[-1] == request.num_tokens and len(content.stops) == len(content.pieces)
        owners.update(set(content.pieces))
    assert len(begun) == 2, "each starts with one of two prefixes"
    assert len({request.blocks[:8] for request in workload.requests}) < 100
    shared = sum([count for count in owners.values() if count > 10]) / owners.total()
    assert shared > 0.7


def test_what_prompts_ask_for_changes_nothing_else() -> None:
    exact, chunks = (generate(f"{DOCUMENTS},reuse={reuse}") for reuse in ("exact", "chunks"))
    assert all(request.content is None for request in exact.requests)
    assert generate(DOCUMENTS).requests == exact.requests
    assert [msgspec.structs.replace(each, content=None) for each in chunks.requests] == exact.requests


def test_paraphrases_are_alike_as_asked_for_and_have_only_the_beginning_in_common() -> None:
    workload = generate(f"{DOCUMENTS},reuse=semantic,paraphrases=0.3,alike=0.9")
    said: list[Request] = []
    num_paraphrases = 0
    for request in workload.requests:
        assert request.content is not None
        found = [
            (each, alike)
            for each in said
            if each.content and (alike := similarity(request.content.signature, each.content.signature)) > 0.5
        ]
        said.append(request)
        if found:
            num_paraphrases += 1
            original, alike = found[0]
            assert alike == pytest.approx(0.9, abs=0.01)
            assert original.num_tokens == request.num_tokens and original.blocks[:4] == request.blocks[:4]
            assert not set(original.blocks[5:]) & set(request.blocks)
    assert 60 < num_paraphrases < 120
