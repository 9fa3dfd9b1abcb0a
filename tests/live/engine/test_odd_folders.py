"""Model folders of five families with odd but legal files: ends, prompts and tokens are those of transformers."""

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
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.gateway import GatewayTokenizer
from tests.models import VOCAB_SIZE, make_model, make_tokenizer, reference_tokens

from .hybrids import save_tiny
from .support import answer_of, tokens_of

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "deepseek_v3"]
ENDS = [f"<|spare_{at}|>" for at in range(6)]
FIRST = 261
"""The id of the first of them."""
PLAIN = "{{ bos_token }}{% for m in messages %}({{ m.role }}){{ m.content }}{{ eos_token }}{% endfor %}"
TOOLS = "{% if tools %}T{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "what?"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}

Files = dict[str, dict[str, Any]]
Oddity = Callable[[Path, Files], object]


# ---- each an oddity of one kind; `files`: of JSON, written after all of them


def token(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **flags}


def set_(name: str, **fields: Any) -> Oddity:
    return lambda folder, files: files.setdefault(name, {}).update(fields)


def drop(name: str) -> Oddity:
    return lambda folder, files: files.pop(name, None)


def both(*oddities: Oddity) -> Oddity:
    return lambda folder, files: [each(folder, files) for each in oddities]


def write(name: str, text: str) -> Oddity:
    def oddity(folder: Path, files: Files) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return oddity


def stray(name: str) -> Oddity:
    """Weights of another model beside the right ones."""

    def oddity(folder: Path, files: Files) -> None:
        tensors = load_file(sorted(folder.glob("model*.safetensors"))[0])
        save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, folder / name, {"format": "pt"})

    return oddity


def stale_index(folder: Path, files: Files) -> None:
    """Of shards that somebody put together."""
    if (folder / "model.safetensors").exists():
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "gone.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def older_rope(folder: Path, files: Files) -> None:
    """As files before transformers 5 have it."""
    rope = files["config"].pop("rope_parameters")
    files["config"]["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    files["config"]["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}


def older_dtype(folder: Path, files: Files) -> None:
    files["config"]["torch_dtype"] = files["config"].pop("dtype")


def nothing(folder: Path, files: Files) -> None: ...


def head(change: Callable[[Tensor], Tensor]) -> Oddity:
    """What the weights have for a head, made of the embedding, also where config.json ties them."""

    def oddity(folder: Path, files: Files) -> None:
        path = folder / "model.safetensors"
        if not path.exists():
            return
        tensors = load_file(path)
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"])
        save_file(tensors, path, {"format": "pt"})

    return oddity


KINDS: dict[str, list[Oddity]] = {
    "generation": [
        set_("generation_config", eos_token_id=FIRST),
        set_("generation_config", eos_token_id=[FIRST, FIRST + 1]),
        set_("generation_config", eos_token_id=[FIRST, 9_999]),
        drop("generation_config"),
    ],
    "config": [
        set_("config", eos_token_id=FIRST + 2),
        set_("config", eos_token_id=[FIRST + 2, FIRST]),
        set_("config", eos_token_id=None),
    ],
    "tokenizer": [
        nothing,
        set_("tokenizer_config", eos_token=ENDS[3]),
        set_("tokenizer_config", eos_token={"__type": "AddedToken", **token(ENDS[3])}),
        set_("tokenizer_config", eos_token=ENDS[3], added_tokens_decoder={"264": token(ENDS[3])}),
    ],
    "map": [
        nothing,
        nothing,
        set_("special_tokens_map", eos_token=ENDS[4]),
        set_("special_tokens_map", eos_token=token(ENDS[4]), bos_token=token(ENDS[5])),
    ],
    "weights": [
        nothing,
        stray("model_before_finetuning.safetensors"),
        stray("consolidated.safetensors"),
stale_index,
        write("pytorch_model.bin", "not looked at"),
    ],
    "head": [
        nothing,
        set_("config", tie_word_embeddings=True),
        both(set_("config", tie_word_embeddings=True), head(torch.clone)),
        head(lambda embedding: embedding.flip(0)),
    ],
    "template": [
        set_("tokenizer_config", chat_template=PLAIN),
        set_(
            "tokenizer_config",
            chat_template=[{"name": n, "template": t} for n, t in {"default": PLAIN, "tool_use": TOOLS}.items()],
        ),
        both(set_("tokenizer_config", chat_template="no"), write("chat_template.jinja", PLAIN + "\n")),
        both(write("chat_template.jinja", PLAIN), write("additional_chat_templates/tool_use.jinja", TOOLS)),
        both(write("chat_template.jinja", PLAIN), write("additional_chat_templates/rag.jinja", TOOLS)),
    ],
    "spelling": [nothing, older_rope, older_dtype, both(older_rope, older_dtype)],
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """A folder as transformers saves it; read only."""

    @lru_cache
    def plain(family: str, shards: bool) -> Path:
        folder = tmp_path_factory.mktemp(family)
        if family == "deepseek_v3":
            save_tiny(family, folder)
        else:
            make_model(
                folder, family, shards=shards, tie_word_embeddings=family == "qwen2", num_hidden_layers=2
            )
        make_tokenizer(folder)
        return folder

    return plain


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_ends_prompts_and_tokens_are_those_of_transformers(
    plain: Callable[[str, bool], Path], tmp_path: Path, family: str, seed: int
) -> None:
    draw = Random(f"{family} {seed}")
    folder = shutil.copytree(plain(family, draw.random() < 0.4), tmp_path / "model")
    names = ("config", "generation_config", "tokenizer_config")
    files: Files = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    for name in names:
        (folder / f"{name}.json").unlink()
    for oddities in KINDS.values():
        draw.choice(oddities)(folder, files)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))

    # Not AutoTokenizer: for some models it takes a class that invents tokens where the files name none.
    ours, theirs = GatewayTokenizer.load(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert set(ours.generation.eos) == ends_of(folder, theirs)
    assert ours.template is not None
    for tools in (None, [TOOL]) if ours.template.tool_source else (None,):  # others get tools in words of ours
        options = {"tools": tools, "add_generation_prompt": True}
        assert ours.render(MESSAGES, **options) == theirs.apply_chat_template(
            MESSAGES, tokenize=False, **options
        )
        expected = theirs.apply_chat_template(MESSAGES, **options, return_dict=False)
        assert ours.encode_chat(MESSAGES, **options) == expected
    engine = Engine(folder, EngineOptions(device="cpu", dtype="float32", kv_bytes=1 << 20))
    prompt = tokens_of(20)
    assert answer_of(engine, prompt, 6) == reference_tokens(folder, prompt, 6)


def ends_of(folder: Path, tokenizer: Any) -> set[int]:
    """What transformers' models generate until, and the end token of its tokenizer, of those that there are."""
    if (folder / "generation_config.json").exists():
        generation = transformers.GenerationConfig.from_pretrained(folder)
    else:
        generation = transformers.GenerationConfig.from_model_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
    stated = generation.eos_token_id
    ids = {*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id}
    return {each for each in ids if each is not None and each < VOCAB_SIZE}
