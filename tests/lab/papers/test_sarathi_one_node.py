from __future__ import annotations

from collections.abc import Sequence

from isthmus.lab.papers.sarathi.one_node import WHOLE, BatchLimits, PaperRequest, serve

MS = 10**9


def step_ps(chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
    """A ms for each token, and 10 for the iteration."""
    return (10 + sum(count for count, _ in chunks) + num_decodes) * MS


def test_a_request_alone() -> None:
    served = serve([PaperRequest(25, 3, arrival_ns=7_000_000)], step_ps, BatchLimits(10, 4))
    assert [(batch.chunks, batch.num_decodes, batch.context) for batch in served.batches] == [
        (((10, 0),), 0, 0),
        (((10, 10),), 0, 0),
        (((5, 20),), 0, 0),
        ((), 1, 26),
        ((), 1, 27),
    ]
    assert served.ttft_ns() == [55_000_000] and served.gaps_ns() == [11_000_000] * 2
    assert served.worked_ps == 77 * MS and served.ends_ps[-1] == 84 * MS
    assert (served.admitted, served.first, served.last(0)) == ([0], [2], 4)
    later = [PaperRequest(5, 1), PaperRequest(5, 1, arrival_ns=10**12)]
    served = serve(later, step_ps, BatchLimits(WHOLE, 4))
    assert served.ttft_ns() == [15_000_000] * 2 and served.worked_ps == 30 * MS


def test_who_comes_while_it_works_joins_the_next_batch() -> None:
    served = serve(
        [PaperRequest(5, 4), PaperRequest(6, 1, arrival_ns=16_000_000)], step_ps, BatchLimits(WHOLE, 4)
    )
    assert [(batch.chunks, batch.num_decodes) for batch in served.batches] == [
        (((5, 0),), 0),
        ((), 1),
        (((6, 0),), 1),
        ((), 1),
    ]
    assert served.ttft_ns() == [15_000_000, 27_000_000]
    assert served.gaps_ns() == [11_000_000, 17_000_000, 11_000_000]


def test_short_prompts_wait_less_beside_a_long_one_and_the_node_works_no_longer() -> None:
    """Against order of arrival: short prompts come through, the long one is delayed by what they take."""
    requests = [PaperRequest(2000, 1)] + [PaperRequest(20, 1, arrival_ns=at * 10**8) for at in range(10)]
    order, shared = (serve(requests, step_ps, BatchLimits(100, 16, partial_prefills=n)) for n in (1, 4))
    shorts = [max(served.ttft_ns()[1:]) for served in (order, shared)]
    assert shorts[1] * 5 < shorts[0]
    assert shared.ttft_ns()[0] <= order.ttft_ns()[0] + 10 * 30 * 10**6
    assert shared.worked_ps <= order.worked_ps
