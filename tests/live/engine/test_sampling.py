from __future__ import annotations

import math
from bisect import bisect_left

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from isthmus.core.types import Sampling
from isthmus.live.engine.sampling import CHUNK, LEADING, Row, _adjusted, _found, sample, uniform

from .support import permutation, randn

_DRAWS = sorted((uniform(seed, 0), seed) for seed in range(20_000))


def seed_that_draws(share: float) -> tuple[float, int]:
    """(the draw, a seed) such that the first draw of the seed is about `share`."""
    return _DRAWS[min(bisect_left(_DRAWS, (share, 0)), len(_DRAWS) - 1)]


def choose(logits: Tensor, sampling: Sampling, outputs: tuple[int, ...] = ()) -> int:
    return sample(logits[None], [Row(sampling, outputs)])[0][0]


# ---- uniform


def test_uniform_gives_the_same_numbers_for_ever() -> None:
    """A change would make the same seed sample another text."""
    assert [[uniform(seed, index) for index in (0, 1, 1000)] for seed in (0, 1, 2**63)] == [
        [0.7100947754807029, 0.9502272167827227, 0.7650922596508453],
        [0.12523519879351686, 0.457246044626729, 0.2510919317551198],
        [0.7730759765247204, 0.1998096785132204, 0.31518501463017834],
    ]


def test_seeds_of_any_size_and_sign_are_taken_modulo_two_to_the_64() -> None:
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert uniform(2**64 + 3, 5) == uniform(3, 5)


@pytest.mark.parametrize("axis", ["seed", "index", "seed near 2**63", "both"])
def test_uniform_is_uniform_and_uncorrelated_along(axis: str) -> None:
    pairs = {
        "seed": lambda n: (n, 0),
        "index": lambda n: (7, n),
        "seed near 2**63": lambda n: (2**63 - n, 3),
        "both": lambda n: (n, n),
    }
    count, bins = 20_000, 50
    draws = torch.tensor([uniform(*pairs[axis](n)) for n in range(count)], dtype=torch.float64)
    assert float(draws.min()) >= 0 and float(draws.max()) < 1
    observed = torch.histc(draws, bins=bins, min=0, max=1)
    chi_square = float(((observed - count / bins) ** 2 / (count / bins)).sum())
    assert 20 < chi_square < 95  # 49 degrees of freedom: outside with probability below 1e-4
    following = torch.corrcoef(torch.stack((draws[:-1], draws[1:])))[0, 1]
    assert abs(float(following)) < 4 / math.sqrt(count)


# ---- which tokens stay


def kept_tokens(logits: Tensor, sampling: Sampling) -> list[tuple[int, float]]:
    """By definition: (token, share of the draw) in the order of ids.

    top_k keeps the k most likely, of equal ones those with lower ids; min_p those at least min_p times the most
    likely; top_p the fewest of the rest that together reach top_p of it. Examples at the edge of a rounding error are
    thrown away.
    """
    scores = [float(x) / sampling.temperature for x in logits]
    weights = [math.exp(x - max(scores)) for x in scores]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.min_p:
        assume(all(abs(weights[token] - sampling.min_p) > 1e-5 for token in ranked))
        ranked = [token for token in ranked if weights[token] >= sampling.min_p]
    if sampling.top_p < 1:
        total, reached, fewest = sum(weights[token] for token in ranked), 0.0, []
        for token in ranked:
            if reached >= sampling.top_p:
                break
            reached += weights[token] / total
            assume(abs(reached - sampling.top_p) > 1e-5)
            fewest.append(token)
        ranked = fewest
    total = sum(weights[token] for token in ranked)
    return [(token, weights[token] / total) for token in sorted(ranked)]


@st.composite
def filters(draw: st.DrawFn) -> tuple[Tensor, Sampling]:
    # Quarters: exact in binary, and often equal to one another.
    logits = draw(st.lists(st.integers(-16, 16), min_size=1, max_size=12))
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.5, 1.0, 1.7])),
        top_k=draw(st.integers(0, 14)),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.001, 0.999))),
    )
    return torch.tensor(logits) / 4, sampling


@settings(max_examples=300)
@given(filters())
def test_exactly_the_kept_tokens_are_drawn_each_with_its_share(example: tuple[Tensor, Sampling]) -> None:
    logits, sampling = example
    low = 0.0
    for token, share in kept_tokens(logits, sampling):
        draw, seed = seed_that_draws(low + share / 2)
        if low + 1e-5 < draw < low + share - 1e-5:
            assert choose(logits, replace(sampling, seed=seed)) == token
        low += share
    # The ends: the smallest draw takes the first token kept, the largest the last one.
    tokens = [token for token, _ in kept_tokens(logits, sampling)]
    assert choose(logits, replace(sampling, seed=_DRAWS[0][1])) == tokens[0]
    if kept_tokens(logits, sampling)[-1][1] > 1e-4:
        assert choose(logits, replace(sampling, seed=_DRAWS[-1][1])) == tokens[-1]


@pytest.mark.parametrize(
    ("logits", "sampling", "reached"),
    [
        ([0.0, 0.0, 0.0, 0.0], Sampling(top_p=0.5), {0, 1}),  # reached exactly, it keeps no more
        ([1.0, 1.0, -5.0], Sampling(min_p=1.0), {0, 1}),  # at exactly its bound
        ([0.0, 3.0, 1.0], Sampling(top_p=0.0), {1}),  # some token always stays
        ([0.0, 3.0, 1.0], Sampling(top_k=1, top_p=1e-9, min_p=1.0), {1}),
        ([0.0, 0.0], Sampling(top_k=100), {0, 1}),
    ],
)
def test_at_its_end_each_filter_keeps(logits: list[float], sampling: Sampling, reached: set[int]) -> None:
    found = {choose(torch.tensor(logits), replace(sampling, seed=seed)) for seed in range(200)}
    assert found == reached


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([1e4, -1e4, 1e4 - 1.0, 0.0])
    for seed in range(50):
        assert choose(logits, Sampling(temperature=1e-6, seed=seed)) == 0


# ---- vocabularies of many chunks, as the warpers of transformers cut them


VOCABULARY = 3 * CHUNK + 17


@pytest.mark.parametrize("spread", [0.2, 3.0])
@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        (Sampling(), []),
        (Sampling(top_k=7), [TopKLogitsWarper(7)]),
        (Sampling(top_k=LEADING + 30), [TopKLogitsWarper(LEADING + 30)]),
        (Sampling(top_p=0.3), [TopPLogitsWarper(0.3)]),
        (Sampling(top_p=0.98), [TopPLogitsWarper(0.98)]),
        (Sampling(min_p=0.2), [MinPLogitsWarper(0.2)]),
        (Sampling(top_k=90, top_p=0.7), [TopKLogitsWarper(90), TopPLogitsWarper(0.7)]),
        (
            Sampling(top_k=500, min_p=0.1, top_p=0.9),
            [TopKLogitsWarper(500), MinPLogitsWarper(0.1), TopPLogitsWarper(0.9)],
        ),
    ],
)
def test_what_stays_of_a_large_vocabulary_and_how_likely_it_is(
    sampling: Sampling, warpers: list[LogitsProcessor], spread: float
) -> None:
    """All rows at once: each draw falls on the token at which the sum of probabilities by transformers passes it."""
    logits = randn(400, VOCABULARY) * spread
    warped = logits
    for warper in warpers:
        warped = warper(None, warped)
    sums = warped.double().softmax(-1).cumsum(-1)
    rows = [Row(replace(sampling, seed=seed), ()) for seed in range(400)]
    draws = torch.tensor([uniform(seed, 0) for seed in range(400)], dtype=torch.float64)[:, None]
    expected = torch.searchsorted(sums, draws * sums[:, -1:], right=True)[:, 0]
    found = torch.tensor(sample(logits, rows)[0])
    # A draw may lie within a rounding error of the end of its token, a weight of the end of top-p.
    assert int((found != expected).sum()) <= 2
    assert torch.isfinite(warped.gather(1, found[:, None])).all()


def test_no_draw_falls_on_what_has_no_weight() -> None:
    """Neither at the ends of a chunk nor behind the vocabulary."""
    logits = torch.full((2, VOCABULARY), -1e9)
    logits[:, CHUNK - 1] = logits[:, 2 * CHUNK] = 0.0
    for share in (0.0, 0.4999999, 0.5, 1 - 2.0**-53):
        found = _found(logits.exp(), torch.tensor([share, share], dtype=torch.float64))
        assert found == [CHUNK - 1 if share < 0.5 else 2 * CHUNK] * 2


# ---- temperature 0, penalties, bias


def test_temperature_zero_is_argmax() -> None:
    logits = randn(50, 272)
    for sampling in (
        Sampling(temperature=0),
        Sampling(temperature=0, logprobs=2, seed=9),
        Sampling(temperature=0, top_k=5, top_p=0.1, min_p=0.5),
        Sampling(temperature=0, logit_bias=((3, 0.0),)),
    ):
        tokens, _ = sample(logits, [Row(sampling, [1, 2, 3])] * 50)
        assert tokens == logits.argmax(dim=-1).tolist()


PENALTY = st.sampled_from([-2.0, -0.5, 0.0, 0.3, 1.0, 2.0])


@settings(max_examples=200)
@given(
    outputs=st.lists(st.integers(0, 7), max_size=12),
    presence=PENALTY,
    frequency=PENALTY,
    bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 0.7, 100.0]), max_size=3),
    seed=st.integers(0, 100),
)
def test_bias_is_added_and_penalties_taken_off_by_count_and_presence(
    outputs: list[int], presence: float, frequency: float, bias: dict[int, float], seed: int
) -> None:
    logits = randn(8, seed=seed)
    adjusted = [
        float(logits[token])
        + bias.get(token, 0.0)
        - frequency * outputs.count(token)
        - presence * (outputs.count(token) > 0)
        for token in range(8)
    ]
    runner_up, best = sorted(adjusted)[-2:]
    assume(best - runner_up > 1e-4)
    fields = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "logit_bias": tuple(bias.items()),
    }
    assert choose(logits, Sampling(temperature=0, **fields), tuple(outputs)) == adjusted.index(best)
    plain = Sampling(temperature=0.8, seed=seed)
    drawn = choose(logits, Sampling(temperature=0.8, seed=seed, **fields), tuple(outputs))
    low, edges = 0.0, []
    for _, share in kept_tokens(torch.tensor(adjusted), plain):
        low += share
        edges.append(low)
    assume(all(abs(uniform(seed, len(outputs)) - edge) > 1e-5 for edge in edges))
    assert drawn == choose(torch.tensor(adjusted), plain, tuple(outputs))


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_what_prompt_or_answer_has_is_repeated_less_as_transformers_does(penalty: float) -> None:
    logits, prompt, outputs = randn(6, 40), [1, 5, 9], [[], [5], [3, 3, 7], [1, 2, 4], [39], [0, 5]]
    process = RepetitionPenaltyLogitsProcessor(penalty)
    for each, answer in zip(logits, outputs, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        expected = process(ids, each[None].clone())[0]
        sampling = Sampling(temperature=0, repetition_penalty=penalty)
        row = Row(sampling, answer, prompt)
        assert sample(each[None], [row])[0] == [int(expected.argmax())]
        assert torch.equal(_adjusted(each, row), expected)


# ---- independence of the batch


def test_a_draw_depends_on_seed_and_index_alone_whatever_the_batch() -> None:
    logits = randn(12, 50)
    kinds = [
        Sampling(seed=1),
        Sampling(temperature=0),
        Sampling(temperature=0.6, top_p=0.8, seed=2),
        Sampling(seed=3, logit_bias=((4, 2.0),)),
        Sampling(top_k=3, presence_penalty=0.5, logprobs=2, seed=4),
        Sampling(temperature=0, logprobs=1),
    ]
    rows = [Row(kinds[index % 6], list(range(index))) for index in range(12)]
    alone = [sample(logits[index : index + 1], [row])[0][0] for index, row in enumerate(rows)]
    assert sample(logits, rows)[0] == alone
    for seed in range(5):
        order = permutation(12, seed)[: 3 + seed]
        assert sample(logits[order], [rows[at] for at in order])[0] == [alone[at] for at in order]


# ---- log-probabilities


def test_logprobs_are_those_of_the_model_before_everything_else() -> None:
    logits = randn(1, 40)
    expected = logits[0].double().log_softmax(0)
    for sampling in (
        Sampling(logprobs=5, seed=2),
        Sampling(logprobs=5, temperature=0),
        Sampling(logprobs=5, temperature=0.2, top_k=1, presence_penalty=2.0, logit_bias=((7, 100.0),)),
    ):
        (token,), (found,) = sample(logits, [Row(sampling, [3, 3])])
        assert found is not None
        assert found.chosen == pytest.approx(float(expected[token]), abs=1e-5)
        values, tokens = expected.topk(5)
        assert [at for at, _ in found.top] == tokens.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_come_only_where_asked_for() -> None:
    logits = randn(3, 10)
    kinds = [Sampling(temperature=0), Sampling(temperature=0, logprobs=0), Sampling(temperature=0, logprobs=99)]
    _, (none, only_chosen, everything) = sample(logits, [Row(kind, []) for kind in kinds])
    assert none is None
    assert only_chosen is not None and only_chosen.top == ()
    assert only_chosen.chosen == pytest.approx(float(logits[1].log_softmax(0).max()), abs=1e-6)
    assert everything is not None and len(everything.top) == 10
