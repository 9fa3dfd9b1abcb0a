from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.live.engine.engine import Engine, EngineOptions

from .conftest import FolderOf
from .support import edit, refusal

INDEX = "model.safetensors.index.json"
Change = Callable[[Path], object]


@pytest.fixture
def folder(folder_of: FolderOf, tmp_path: Path) -> Path:
    """A copy of the plain llama folder, to be broken."""
    return shutil.copytree(folder_of("llama"), tmp_path / "llama")


@pytest.fixture
def sharded(folder_of: FolderOf, tmp_path: Path) -> Path:
    return shutil.copytree(folder_of("llama-shards"), tmp_path / "shards")


def load(folder: Path, dtype: str | None = None) -> Engine:
    return Engine(folder, EngineOptions(dtype=dtype, device="cpu", kv_bytes=1 << 17))


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ---- refusals


def test_a_folder_without_safetensors_is_refused_and_other_formats_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no .safetensors weights" in refusal(folder)
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt"):
        (folder / name).write_bytes(b"")
        message = refusal(folder)
        assert name in message and "safetensors" in message
        (folder / name).unlink()


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_or_misshapen_tensor_or_one_of_another_type_is_named(folder: Path, name: str) -> None:
    right = load_file(folder / "model.safetensors")[name]
    wrong = [(torch.cat((right, right)), "shape"), (right.to(torch.int8), "int8"), (right.double(), "float64")]
    for tensor, says in wrong:
        edit(folder, lambda tensors, tensor=tensor: tensors.update({name: tensor}))
        message = refusal(folder)
        assert name in message and says in message
    edit(folder, lambda tensors: tensors.pop(name))
    assert name in refusal(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "half-a-length", "half-a-header", "last-byte"])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'])
def test_a_broken_weight_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


# ---- which files


def named(name: str) -> Change:
    """In config.json."""
    return lambda folder: edit_config(folder, transformers_weights=name)


def stray(name: str) -> Change:
    """A file beside the right ones, with other weights."""

    def change(folder: Path) -> None:
        path = sorted(folder.glob("model*.safetensors"))[0]
        save_file(
            {key: tensor * 0.5 for key, tensor in load_file(path).items()}, folder / name, {"format": "pt"}
        )

    return change


def moved(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / "model.safetensors").rename(folder / name)

    return change


def index_of(name: str) -> Change:
    """An index that has all tensors in one file."""

    def change(folder: Path) -> None:
        names = load_file(folder / "model.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
        (folder / INDEX).write_text(json.dumps(index))

    return change


CHOSEN: dict[str, tuple[str, list[Change]]] = {
    "a stray file": ("llama", [stray("a_model_before_finetuning.safetensors")]),
    "a stale index": ("llama", [index_of("gone.safetensors")]),
    "a variant": ("llama", [stray("model.fp16.safetensors")]),
    "an adapter": ("llama", [stray("adapter_model.safetensors")]),
    "shards and Mistral's own file": ("llama-shards", [stray("consolidated.safetensors")]),
    "shards and one of others": ("llama-shards", [stray("model-00009-of-00009.safetensors")]),
    "an index into a folder": ("llama", [index_of("in/a.safetensors"), moved("in/a.safetensors")]),
    "named in config.json": ("llama", [stray("b.safetensors"), moved("c.safetensors"), named("c.safetensors")]),
    "an index named in config.json": (
        "llama",
        [index_of("c.safetensors"), moved("c.safetensors"), named(INDEX)],
    ),
}
REFUSED: list[tuple[list[Change], str]] = [
    ([stray("b.safetensors"), moved("a.safetensors")], "which weights? found a.safetensors, b."),
    ([moved("model-00001-of-00002.safetensors")], f"their {INDEX} is missing"),
    ([moved("adapter_model.safetensors")], "found adapter_model.safetensors, which"),
    ([index_of("gone.safetensors"), moved("b.safetensors")], "gone.safe"),
    ([named("c.safetensors")], "c.safetensors: no such file"),
    ([named("pytorch_model.bin")], "transformers_weights must name safetensors"),
    ([named("../c.safetensors")], "outside the model's folder: '../c.safetensors'"),
]


@pytest.mark.parametrize("case", CHOSEN)
def test_the_weights_are_those_that_transformers_reads(folder_of: FolderOf, tmp_path: Path, case: str) -> None:
    folder = changed(folder_of, tmp_path, *CHOSEN[case])
    right = transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama")).state_dict()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, right[name]) for name, tensor in theirs.items())
    assert load(folder).revision == load(folder_of("llama")).revision


@pytest.mark.parametrize(
    ("changes", "says"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_transformers_does_not_load_is_refused(
    folder_of: FolderOf, tmp_path: Path, changes: list[Change], says: str
) -> None:
    folder = changed(folder_of, tmp_path, "llama", changes)
    assert says in refusal(folder)
    with pytest.raises((OSError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_shards_without_their_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"their {INDEX} is missing" in refusal(sharded)


@pytest.mark.parametrize("name", ["/etc/a.safetensors", "../llama/a.safetensors", "in/../../a.safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    index_of(name)(folder)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    assert f"outside the model's folder: {name!r}" in refusal(folder)


def test_a_folder_of_links_is_read(folder: Path, tmp_path: Path) -> None:
    """As downloads are kept."""
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    load(folder)


def test_what_is_chosen_and_left_is_said_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        caplog.clear()
        load(folder)
        return [
            record.getMessage() for record in caplog.records if record.name == "isthmus.live.engine.weights"
        ]

    assert not said()
    stray("b.safetensors")(folder)
    index_of("gone.safetensors")(folder)
    assert said() == [f"{folder}: weights are read from model.safetensors; not read: b.safetensors, {INDEX}"]
    for name in ("b.safetensors", INDEX):
        (folder / name).unlink()
    (folder / "model.safetensors").rename(folder / "other-name.safetensors")
    assert said() == [f"{folder}: weights are read from other-name.safetensors"]
    edit_config(folder, tie_word_embeddings=True)
    assert said()[1:] == [f"{folder}: config.json ties the head to the embedding; the weights' own is used"]


def changed(folder_of: FolderOf, tmp_path: Path, case: str, changes: list[Change]) -> Path:
    folder = shutil.copytree(folder_of(case), tmp_path / "model")
    for change in changes:
        change(folder)
    return folder


# ---- revision


def test_the_revision_is_that_of_the_weights_not_of_their_files(
    folder: Path, sharded: Path, folder_of: FolderOf
) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    revision = load(folder).revision
    assert load(sharded).revision == revision == load(folder_of("llama")).revision
    (folder / "model.safetensors").rename(folder / "other-name.safetensors")
    (folder / "tokenizer.json").unlink()
    assert load(folder).revision == revision


def nudged(name: str) -> Change:
    """The last number of a tensor by its last bit."""

    def nudge(tensors: dict[str, Tensor]) -> None:
        last = tensors[name].view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.tensor(1e9)))

    return lambda folder: edit(folder, nudge)


def swapped(folder: Path) -> None:
    k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    edit(folder, lambda tensors: tensors.update({k: tensors[v], v: tensors[k]}))


def config(**fields: object) -> Change:
    return lambda folder: edit_config(folder, **fields)


UNUSED = {"model.layers.0.rotary_emb.inv_freq": torch.ones(8)}
OTHER: dict[str, tuple[str, Change]] = {
    **{
        name: ("llama", nudged(name))
        for name in (
            "model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight",
            "model.layers.2.mlp.gate_proj.weight", "model.layers.1.post_attention_layernorm.weight",
            "model.norm.weight", "lm_head.weight",
        )
    },
    "equal shapes swapped": ("llama", swapped),
    "theta": ("llama", config(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})),
    "rope": ("llama", config(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0})),
    "eps": ("llama", config(rms_norm_eps=1e-3)),
    "family": ("llama", config(architectures=["MistralForCausalLM"], sliding_window=40)),
    "window": ("mistral-window", config(sliding_window=41)),
}  # fmt: skip
SAME: dict[str, tuple[str, Change]] = {
    "a tensor that the network does not use": (
        "llama", lambda folder: edit(folder, lambda tensors: tensors.update(UNUSED))
    ),
    "the older spelling of rope": ("llama", config(rope_parameters=None, rope_theta=10_000.0, rope_scaling=None)),
}  # fmt: skip


@pytest.mark.parametrize("change", [*OTHER, *SAME])
def test_what_computes_something_else_changes_the_revision(
    folder_of: FolderOf, tmp_path: Path, change: str
) -> None:
    case, how = (OTHER | SAME)[change]
    same = load(changed(folder_of, tmp_path, case, [how])).revision == load(folder_of(case)).revision
    assert same is (change in SAME)
