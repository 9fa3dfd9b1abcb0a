from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.engine.engine import Engine, EngineOptions
from isthmus.errors import ModelError

from .conftest import FolderOf

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(folder_of: FolderOf, tmp_path: Path) -> Path:
    """A copy of the plain llama folder, to be broken."""
    return shutil.copytree(folder_of("llama"), tmp_path / "llama")


@pytest.fixture
def sharded(folder_of: FolderOf, tmp_path: Path) -> Path:
    return shutil.copytree(folder_of("llama-shards"), tmp_path / "shards")


def load(folder: Path, dtype: str | None = None) -> Engine:
    return Engine(folder, EngineOptions(dtype=dtype, device="cpu", kv_bytes=1 << 17))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ---- refusals


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_folder_with_only_other_formats_is_refused_and_they_are_named(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message and "safetensors" in message


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no .safetensors weights" in refusal(folder)


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
def test_a_missing_or_misshapen_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.cat((tensors[name], tensors[name]))}))
    message = refusal(folder)
    assert name in message and "shape" in message
    edit(folder, lambda tensors: tensors.pop(name))
    assert name in refusal(folder)


def test_a_transposed_tensor_is_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    assert name in refusal(folder)


def test_a_bias_that_the_config_states_must_be_there(folder: Path) -> None:
    edit_config(folder, attention_bias=True)
    assert "q_proj.bias" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_a_tensor_of_another_type_is_named(folder: Path, dtype: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=dtype)}))
    message = refusal(folder)
    assert "model.norm.weight" in message and str(dtype) in message


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "half-a-length", "half-a-header", "last-byte"])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors" in refusal(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-0*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-0*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert shard.name in refusal(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "", '{"weight_map": [1]}', '{"weight_map": {"a": 5}}'])
def test_a_broken_weight_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert INDEX in refusal(sharded)


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


def test_the_revision_does_not_depend_on_the_type_computed_in(folder: Path) -> None:
    """The layout, which says the type, is in a block's name beside the revision."""
    assert load(folder, "float32").revision == load(folder, "bfloat16").revision


def test_tensors_the_network_does_not_use_do_not_count(folder: Path) -> None:
    before = load(folder).revision
    edit(folder, lambda tensors: tensors.update({"model.layers.0.rotary_emb.inv_freq": torch.ones(8)}))
    assert load(folder).revision == before


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_one_changed_weight_changes_the_revision(folder: Path, name: str) -> None:
    before = load(folder).revision

    def nudge(tensors: dict[str, Tensor]) -> None:
        last = tensors[name].view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.tensor(1e9)))

    edit(folder, nudge)
    assert load(folder).revision != before


def test_swapping_two_equal_shaped_tensors_changes_the_revision(folder: Path) -> None:
    before = load(folder).revision
    k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    edit(folder, lambda tensors: tensors.update({k: tensors[v], v: tensors[k]}))
    assert load(folder).revision != before


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
        {"rms_norm_eps": 1e-3},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 40},
    ],
)
def test_a_config_that_computes_something_else_changes_the_revision(
    folder: Path, fields: dict[str, object]
) -> None:
    before = load(folder).revision
    edit_config(folder, **fields)
    assert load(folder).revision != before


def test_another_window_changes_the_revision(folder_of: FolderOf, tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("mistral-window"), tmp_path / "mistral")
    before = load(folder).revision
    edit_config(folder, sliding_window=41)
    assert load(folder).revision != before


def test_both_spellings_of_rope_have_one_revision(folder: Path) -> None:
    before = load(folder).revision
    edit_config(folder, rope_parameters=None, rope_theta=10_000.0, rope_scaling=None)
    assert load(folder).revision == before
