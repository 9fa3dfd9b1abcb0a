"""Model folders of five families with odd but legal files: ends and tokens are those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from isthmus.live.gateway import GatewayTokenizer
from tests.models import VOCAB_SIZE, make_model, make_tokenizer, reference_tokens

from .hybrids import save_tiny
from .support import answer_of, edit, engine_of, tokens_of

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "deepseek_v3"]
FIRST = 261
"""The id of the first of six spare tokens."""
Files = dict[str, dict[str, Any]]
Oddity = Callable[[Path, Files], object]


# ---- each an oddity of one kind; `files`: of JSON, written after all of them


def token(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **flags}


def set_(name: str, **fields: Any) -> Oddity:
    return lambda folder, files: files.setdefault(name, {}).update(fields)


def both(*oddities: Oddity) -> Oddity:
    return lambda folder, files: [each(folder, files) for each in oddities]


def nothing(folder: Path, files: Files) -> None: ...


def older_rope(folder: Path, files: Files) -> None:
    """As files before transformers 5 have it."""
    rope = files["config"].pop("rope_parameters")
    files["config"]["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    files["config"]["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}


def older_dtype(folder: Path, files: Files) -> None:
    files["config"]["torch_dtype"] = files["config"].pop("dtype")


def head(change: Callable[[Tensor], Tensor]) -> Oddity:
    """What the weights have for a head, made of the embedding, also where config.json ties them."""
    embedding = "model.embed_tokens.weight"
    return lambda folder, files: edit(
        folder, lambda tensors: tensors.update({"lm_head.weight": change(tensors[embedding])})
    )


END, OTHER_END = "<|spare_3|>", "<|spare_4|>"
KINDS: dict[str, list[Oddity]] = {
    "generation": [
        set_("generation_config", eos_token_id=FIRST),
        set_("generation_config", eos_token_id=[FIRST, FIRST + 1]),
        set_("generation_config", eos_token_id=[FIRST, 9_999]),
        lambda folder, files: files.pop("generation_config"),
    ],
    "config": [
        set_("config", eos_token_id=FIRST + 2),
        set_("config", eos_token_id=[FIRST + 2, FIRST]),
        set_("config", eos_token_id=None),
    ],
    "tokenizer": [
        nothing,
        set_("tokenizer_config", eos_token=END),
        set_("tokenizer_config", eos_token={"__type": "AddedToken", **token(END)}),
        set_("tokenizer_config", eos_token=END, added_tokens_decoder={"264": token(END)}),
    ],
    "map": [
        nothing,
        set_("special_tokens_map", eos_token=OTHER_END),
        set_("special_tokens_map", eos_token=token(OTHER_END), bos_token=token("<|spare_5|>")),
    ],
    "head": [
        nothing,
        set_("config", tie_word_embeddings=True),
        both(set_("config", tie_word_embeddings=True), head(torch.clone)),
        head(lambda embedding: embedding.flip(0)),
    ],
    "spelling": [nothing, older_rope, older_dtype, both(older_rope, older_dtype)],
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder as transformers saves it; read only."""

    @lru_cache
    def plain(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        if family == "deepseek_v3":
            save_tiny(family, folder)
            make_tokenizer(folder)
        else:
            make_model(folder, family, tie_word_embeddings=family == "qwen2", num_hidden_layers=2)
        return folder

    return plain


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_ends_and_tokens_are_those_of_transformers(
    plain: Callable[[str], Path], tmp_path: Path, family: str, seed: int
) -> None:
    draw = Random(f"{family} {seed}")
    folder = shutil.copytree(plain(family), tmp_path / "model")
    names = ("config", "generation_config", "tokenizer_config")
    files: Files = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    for oddities in KINDS.values():
        draw.choice(oddities)(folder, files)
    for name in names:
        (folder / f"{name}.json").unlink()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))

    # Not AutoTokenizer: for some models it takes a class that invents tokens where the files name none.
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert set(GatewayTokenizer.load(folder).generation.eos) == ends_of(folder, theirs)
    assert answer_of(engine_of(folder), tokens_of(20), 6) == reference_tokens(folder, tokens_of(20), 6)


def ends_of(folder: Path, tokenizer: Any) -> set[int]:
    """What transformers' models generate until, and the end token of its tokenizer, of those that there are."""
    if (folder / "generation_config.json").exists():
        generation = transformers.GenerationConfig.from_pretrained(folder)
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        generation = transformers.GenerationConfig.from_model_config(config)
    stated = generation.eos_token_id
    ids = {*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id}
    return {each for each in ids if each is not None and each < VOCAB_SIZE}
