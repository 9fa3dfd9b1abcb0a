"""The small model that recalls, and its texts: without the minutes of training."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks.recall import KINDS, Text, cases, donor_of, made, table
from benchmarks.recall_model import KEYS, VALUES, WORDS, Llama, Shape, Training, pairs_of, save, text_of, train
from isthmus.bench import BenchError
from isthmus.bench.reuse_measures import all_settings, measure
from isthmus.bench.reuse_runs import Prompts
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.interface import Chunk

SMALL = Shape(num_layers=3, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=32)
SHORT = Training(threads=1, stages=((24, 4, 2, 2),))


def test_pairs_stand_in_a_text_in_their_order() -> None:
    rng = random.Random(0)
    pairs = pairs_of(8, rng)
    text = text_of(pairs, 40, rng)
    assert len(text) == 40
    assert [token for token in text if token not in WORDS] == [token for pair in pairs for token in pair]
    for key, value in pairs:
        assert key in KEYS and value in VALUES and text[text.index(key) + 1] == value


@pytest.mark.parametrize("kind", KINDS)
def test_donors_are_what_their_kind_says(kind: str) -> None:
    text = made(random.Random(1))
    donor = donor_of(kind, text, random.Random(2))
    assert found_in(donor) == donor.values
    same = {key for key, value in text.values.items() if donor.values.get(key) == value}
    assert len(same) >= {"50 % changed": 12, "false": 0, "unrelated": 0}.get(kind, 24)
    if kind == "false":
        assert not same and donor.values.keys() == text.values.keys()
    if kind == "reordered":
        assert sorted(donor.passages) == sorted(text.passages) and donor.passages != text.passages


def found_in(text: Text) -> dict[int, int]:
    flat = [token for part in text.passages for token in part]
    return {key: flat[at + 1] for at, key in enumerate(flat) if key in KEYS}


def test_cases_ask_for_a_key_of_the_target() -> None:
    for case in cases(2, 0):
        target = list(case.target)
        value = target[target.index(target[-1]) + 1]
        assert case.right is not None and case.right([value]) and not case.right([value + 1])
        assert (case.donor == case.target) == (case.kind == "identical")


def test_a_saved_model_is_the_engines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama(SMALL)
    save(model, tmp_path)
    engine = Engine(tmp_path, EngineOptions(device="cpu", kv_bytes=4 << 20))
    tokens = made(random.Random(3)).prompt(20, random.Random(4))[:100]
    found = engine.forward(engine.build([Chunk(tokens, 0, range(7), True)]))
    with torch.inference_mode():
        expected = model.head(model(torch.tensor([tokens]), local=False))[0, -1:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_seed_gives_one_model_and_too_little_training_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="did not learn: "):
        train(SMALL, SHORT)
    monkeypatch.setattr("benchmarks.recall_model.LEARNED", 0.0)
    one, same = (list(train(SMALL, SHORT).parameters()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))


def test_an_identical_donor_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(Llama(SMALL), tmp_path)
    prompts = Prompts(Engine(tmp_path, EngineOptions(device="cpu", kv_bytes=8 << 20)))
    rows = measure(prompts, cases(1, 0), lambda case: all_settings(None if case.kind == "false" else ""))
    for row in rows:
        if row.kind == "identical" and not row.packs:
            assert row.kl < 1e-6 and row.agreement == 1.0 and row.computed < 0.9
    controls = {row.setting: row for row in rows if row.kind == "false"}
    assert controls["epic, zeroed"].computed == controls["epic"].computed
    assert table(rows).row_count == len(rows)
