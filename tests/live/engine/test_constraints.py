from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from isthmus.cli.models import bytes_folder
from isthmus.core.cost import compile_cost
from isthmus.core.types import Sampling
from isthmus.live.engine.constraints import Allowed, Constraints
from isthmus.live.engine.emulated import EmulatedEngine
from isthmus.live.engine.interface import Chunk, Row
from isthmus.live.engine.recipe import recipe_of
from isthmus.live.engine.sampling import sample

from .support import randn
from .test_emulated import CURVE

VOCABULARY = 12
SMALL = Constraints(None, VOCABULARY)
BYTES = Constraints(bytes_folder(), 272)
END = 257


def reference(row: Row, may: set[int], ends: Sequence[int] = ()) -> set[int]:
    """One after another, and what would leave nothing does not count. `may`: by the grammar; `ends`: of it."""
    sampling, outputs = row.sampling, list(row.outputs)
    may = may & set(sampling.allowed_tokens) or may if sampling.allowed_tokens else may
    bad = {token for token in may if any(ends_with([*outputs, token], word) for word in sampling.bad_words)}
    may = may - bad or may
    if len(outputs) < sampling.min_tokens:
        may = may - {*sampling.stop_tokens, *ends} or may
    return may


def ends_with(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return bool(word) and tuple(tokens[-len(word) :]) == tuple(word)


def of(allowed: Allowed | None, at: int, vocabulary: int = VOCABULARY) -> set[int]:
    """What a row may go on with."""
    held = dict(allowed or ())
    return set(held[at].nonzero()[0].tolist()) if at in held else set(range(vocabulary))


TOKENS = st.integers(0, VOCABULARY - 1)
SAMPLINGS = st.builds(
    Sampling,
    min_tokens=st.integers(0, 5),
    stop_tokens=st.lists(TOKENS, max_size=3).map(tuple),
    allowed_tokens=st.lists(TOKENS, max_size=4).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
)
ROWS = st.lists(st.builds(Row, SAMPLINGS, st.lists(st.integers(0, 3), max_size=6)), min_size=1, max_size=4)


@settings(max_examples=300)
@given(ROWS)
def test_rows_may_go_on_as_the_reference_says(rows: list[Row]) -> None:
    allowed = SMALL.allowed(rows)
    for at, row in enumerate(rows):
        assert of(allowed, at) == reference(row, set(range(VOCABULARY)))


@settings(max_examples=60)
@given(ROWS, st.sampled_from(["[a-l]*", "ab?", "(abc|abd)?", "a"]))
def test_so_they_may_beside_a_grammar(rows: list[Row], pattern: str) -> None:
    """Tokens 0 to 11 stand for the letters a to l."""
    letter, outputs = ord("a"), list[int]()
    grammar = LLMatcher.grammar_from_regex(pattern)
    for row in rows:
        given = row.sampling
        sampling = Sampling(
            min_tokens=given.min_tokens,
            stop_tokens=tuple(letter + token for token in given.stop_tokens),
            allowed_tokens=tuple(letter + token for token in given.allowed_tokens),
            bad_words=tuple(tuple(letter + token for token in word) for word in given.bad_words),
            grammar=grammar,
        )
        while not outputs or outputs[-1] != END:
            alone = of(BYTES.allowed([Row(Sampling(grammar=grammar), outputs)]), 0)
            constrained = Row(sampling, outputs)
            expected = reference(constrained, alone, [END])
            assert of(BYTES.allowed([constrained]), 0) == expected
            if len(outputs) > 6:
                break
            outputs.append(min(expected))


def test_rows_without_any_are_free_and_not_waited_for() -> None:
    free = [
        Sampling(),
        Sampling(stop_tokens=(1,), logit_bias=((1, 1.0),)),
        Sampling(min_tokens=3),
        Sampling(min_tokens=2, stop_tokens=(3,)),
    ]
    rows = [Row(sampling, [1, 2]) for sampling in free]
    assert SMALL.allowed(rows) is None
    held = SMALL.allowed([*rows, Row(Sampling(allowed_tokens=(4,)), [])])
    assert held is not None and list(held.rows) == [len(rows)]


def test_tokens_that_the_logits_do_not_have_do_nothing() -> None:
    beyond = Sampling(
        allowed_tokens=(3, 99), bad_words=((99,),), stop_tokens=(99, 12), min_tokens=9, grammar=""
    )
    assert of(SMALL.allowed([Row(beyond, [])]), 0) == {3}


@pytest.mark.parametrize(
    ("sampling", "token", "ends"),
    [
        (Sampling(stop_tokens=(5,)), 5, True),
        (Sampling(stop_tokens=(5,)), END, False),
        (Sampling(), END, False),
        (Sampling(grammar="any"), END, True),
        (Sampling(grammar="any", stop_tokens=(5,)), 5, True),
        (Sampling(grammar="any"), 5, False),
    ],
)
def test_stop_tokens_end_an_answer_and_the_end_of_a_grammar(sampling: Sampling, token: int, ends: bool) -> None:
    assert BYTES.ends(sampling, token) is ends


@pytest.mark.parametrize("min_tokens", [0, 50])
def test_a_complete_grammar_ends_the_answer_whatever_least_length_there_is(min_tokens: int) -> None:
    sampling = Sampling(
        grammar=LLMatcher.grammar_from_regex("ab"), min_tokens=min_tokens, allowed_tokens=(ord("a"), ord("c"))
    )
    row, found = Row(sampling, []), []
    while not row.outputs or not BYTES.ends(sampling, row.outputs[-1]):
        (token,) = of(BYTES.allowed([row]), 0, 272)
        found.append(token)
        row.outputs.append(token)  # type: ignore[attr-defined]
    assert found == [*b"ab", END]


# ---- what engines do with it


@pytest.mark.parametrize("held", [[0, 1, 2, 3], [2], [3, 0]])
@pytest.mark.parametrize("kind", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.4, "temperature": 4.0}])
def test_what_is_sampled_is_what_the_model_without_those_tokens_would_give(
    held: list[int], kind: dict[str, float]
) -> None:
    """Log-probabilities stay the model's own, and rows that are free are as they were."""
    logits, draw = randn(4, 300, seed=3), np.random.default_rng(1)
    rows = [Row(Sampling(seed=at, logprobs=2, **kind), [1]) for at in range(4)]  # type: ignore[arg-type]
    allowed = Allowed(held, draw.random((len(held), 300)) < 0.1)
    smaller = logits.clone()
    for at, tokens_V in allowed:
        smaller[at][torch.from_numpy(~tokens_V)] = -torch.inf
    before = logits.clone()
    tokens, logprobs = sample(logits, rows, allowed)
    assert tokens == sample(smaller, rows)[0]
    assert torch.equal(logits, before)
    for at, token in enumerate(tokens):
        assert at not in held or allowed.tokens_MV[held.index(at), token]
        found = logprobs[at]
        assert found is not None
        assert found.chosen == pytest.approx(float(logits[at].log_softmax(-1)[token]))
        assert found.top[0][0] == int(logits[at].argmax())


def test_a_bias_does_not_bring_back_what_is_not_allowed() -> None:
    allowed = np.zeros((1, 300), np.bool_)
    allowed[0, [7, 8]] = True
    row = Row(Sampling(temperature=0, logit_bias=((3, 100.0), (8, 100.0))), [])
    assert sample(randn(1, 300, seed=1), [row], Allowed([0], allowed))[0] == [8]


def test_the_emulated_engine_chooses_of_what_is_allowed_and_else_as_ever() -> None:
    recipe = recipe_of(bytes_folder(), bytes_folder(), 4)
    engine = EmulatedEngine(recipe, compile_cost(CURVE), 12, max_length=1000)
    chunks = [Chunk([number, 1], 0, [number], True) for number in range(3)]
    free, (certain, _) = Row(Sampling(), []), engine.step(engine.build(chunks), [Row(Sampling(), [])] * 3)
    listed = Row(Sampling(allowed_tokens=(5, 9, 200)), [])
    excluded = Row(Sampling(bad_words=tuple((token,) for token in range(271))), [])
    tokens, _ = engine.step(engine.build(chunks), [listed, free, excluded])
    assert tokens[0] in (5, 9, 200) and tokens[1:] == [certain[1], 271]
    assert engine.step(engine.build(chunks), [listed, free, excluded])[0] == tokens
    digests = {
        engine.step(engine.build([Chunk([number], 0, [0], True)]), [listed])[0][0] for number in range(20)
    }
    assert digests == {5, 9, 200}
