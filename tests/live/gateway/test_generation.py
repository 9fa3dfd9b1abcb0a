from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.core.errors import ModelError
from isthmus.live.gateway.tokenizer import GenerationDefaults, load_generation
from isthmus.model_files import open_files


def load(folder: Path, **generation: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_generation(open_files(folder))


def test_sampling_defaults_of_a_sampling_model(tmp_path: Path) -> None:
    defaults = load(tmp_path, do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    assert defaults == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}])
def test_other_models_get_openai_s(tmp_path: Path, do_sample: dict[str, object]) -> None:
    assert load(tmp_path, temperature=0.6, top_p=0.9, top_k=5, **do_sample) == GenerationDefaults()


@pytest.mark.parametrize("do_sample", [True, False])
def test_a_penalty_of_repetition_holds_for_greedy_models_too(tmp_path: Path, do_sample: bool) -> None:
    assert load(tmp_path, repetition_penalty=1.1, do_sample=do_sample).repetition_penalty == 1.1


def test_no_files(tmp_path: Path) -> None:
    assert load_generation(open_files(tmp_path)) == GenerationDefaults()


def test_an_end_that_is_ignored_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    assert load(tmp_path, eos_token_id=[7, 9]).eos == (7,)
    assert caplog.messages == [f"{tmp_path}: the end token 9 is ignored: the model has 9 tokens"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"top_p": True},
        {"top_k": -1},
        {"eos_token_id": "x"},
        {"eos_token_id": [True]},
        {"repetition_penalty": 0},
    ],
)
def test_wrong_values_are_named(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {next(iter(wrong))}"):
        load(tmp_path, do_sample=True, **wrong)
