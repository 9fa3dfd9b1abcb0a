"""From the configuration to engines and their costs, without starting anything."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.engines import (
    Served,
    kv_layout,
    node_facts,
    open_engine,
    served_model,
    store_opener,
    tokenizer_folder,
)
from isthmus.cli.models import bytes_folder
from isthmus.config import Config, load_config
from isthmus.core.cost import Analytic, Cost, Curve
from isthmus.core.errors import ConfigError, StartError
from isthmus.core.types import NodeId, Role
from isthmus.facts import ClusterPlace, at_home, cost_of, nodes_of, role_config
from isthmus.live.engine.emulated import PacedEngine
from isthmus.live.store import Store

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
CURVE = "{kv_token_bytes: 1000, num_layers: 2, prefill_token_s: 1e-5, decode_points: [[1, 5E-03], [8, 0.01]]}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def emulated(**overrides: Any) -> Config:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(None, {"engine.kind": "emulated", "engine.hardware": "h200", **dotted})


def node_cost(config: Config, role: Role, folder: Path) -> Cost:
    return cost_of(config, role_config(config, role), folder)


def served(config: Config, folder: Path) -> Served:
    nodes = nodes_of(config, config.engine.block_size, model=folder, layout=kv_layout(config, folder))
    return served_model(config, folder, nodes)


def test_each_role_has_its_hardware(folder: Path) -> None:
    config = emulated(roles__prefill={"count": 1, "hardware": "h100", "gpus": 2})
    prefill, decode = (node_cost(config, role, folder) for role in (Role.PREFILL, Role.DECODE))
    assert isinstance(prefill, Analytic) and isinstance(decode, Analytic)
    assert (prefill.hardware.name, prefill.num_gpus) == ("h100", 2)
    assert (decode.hardware.name, decode.num_gpus) == ("h200", 1)
    assert prefill.kv_token_bytes == TOKEN_BYTES
    cost = node_cost(load_config(None, {"engine.dtype": "float32"}), Role.DECODE, folder)
    assert isinstance(cost, Analytic), "a torch node is priced as this kind of machine"
    assert (cost.hardware.name, cost.weight_dtype, cost.kv_dtype) == ("cpu", "fp32", "fp32")


def test_a_curve_is_found_beside_the_configuration(folder: Path) -> None:
    """And numbers as JSON writes them are numbers, which YAML alone takes for texts."""
    (folder / "curve.yaml").write_text(CURVE)
    file = folder / "isthmus.yaml"
    file.write_text("engine: {kind: emulated, cost: curve.yaml}")
    cost = node_cost(at_home(load_config(file, {}), file.parent), Role.MIXED, folder)
    assert isinstance(cost, Curve)
    assert (cost.prefill_token_s, cost.decode_points) == (1e-5, ((1, 5e-3), (8, 0.01)))
    file.write_text(f"engine: {{kind: emulated, cost: {CURVE}}}")
    assert node_cost(at_home(load_config(file, {}), file.parent), Role.MIXED, folder) == cost


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("[1, 2]", "keys and values"), ("a: [", "not valid"), ("{kv_token_byte: 1}", "unknown key")],
)
def test_a_curve_that_is_none_is_one_line(folder: Path, text: str, complaint: str) -> None:
    (folder / "curve.yaml").write_text(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        node_cost(emulated(engine__cost=str(folder / "curve.yaml")), Role.MIXED, folder)
    assert "\n" not in str(caught.value)


def test_memory_counts_the_emulated_models_bytes(folder: Path) -> None:
    config = emulated(engine__kv_memory=100 * 16 * TOKEN_BYTES + 5)
    assert served(config, folder).kv_tokens == 1600
    engine = open_engine(
        config, folder, 1, node_facts(ClusterPlace("", config), Role.MIXED, folder, NodeId("a"))
    )
    assert isinstance(engine, PacedEngine)
    assert (engine.num_blocks, engine.max_length, engine.vocab_size) == (100, 131072, 272)


def test_memory_that_is_not_given_is_what_the_weights_leave(folder: Path) -> None:
    cost = node_cost(emulated(), Role.MIXED, folder)
    assert isinstance(cost, Analytic)
    assert served(emulated(), folder).kv_tokens == cost.kv_capacity_tokens // 16 * 16
    small = served(emulated(engine__hardware="l20", engine__gpus=2), folder)
    assert small.kv_tokens < cost.kv_capacity_tokens
    with pytest.raises(ConfigError, match="give it more GPUs"):
        served(emulated(engine__hardware="rtx4090", engine__dtype="float32"), folder)


def test_a_model_without_a_tokenizer_gets_that_of_bytes(folder: Path) -> None:
    assert tokenizer_folder(folder) == bytes_folder()
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_folder(folder) == folder


def spoilt(folder: Path, how: str) -> None:
    """Does to a node's folder what a disk, or somebody, may do to it while the node runs."""
    (path,) = folder.glob("blocks-*")
    match how:
        case "a place where none can be made":
            shutil.rmtree(folder.parent)
            folder.parent.symlink_to("/proc/1")
        case "a file":
            shutil.rmtree(folder)
            folder.write_text("")
        case "a link":
            folder.rename(folder.with_name("moved"))
            folder.symlink_to(folder.with_name("moved"))
        case "a damaged log":
            path.write_bytes(random.Random(1).randbytes(1 << 16))
        case "a lock of somebody else":
            (folder / "lock").write_text("4711")


@pytest.mark.parametrize(
    "how", ["a file", "a link", "a damaged log", "a lock of somebody else", "a place where none can be made"]
)
def test_a_node_that_is_started_again_goes_on_without_a_folder_that_cannot_be_used(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where that is the first start, the folder may be misspelt."""
    config = emulated(cache__dram="1MiB", cache__ssd="16MiB", cache__folder=str(tmp_path / "kv"))
    facts = node_facts(ClusterPlace("", config), Role.PREFILL, bytes_folder(), NodeId("p"))
    engine = open_engine(config, bytes_folder(), 1, facts)

    def opened(*, ran_before: bool) -> Store:
        opener = store_opener(config, engine, engine.memory.layout, "p", facts, ran_before=ran_before)
        assert opener is not None
        return opener(lambda names: None)

    store = opened(ran_before=False)
    assert store.put(b"block", None, bytes(store.shape.block_bytes)) and store.flush()
    store.close()
    spoilt(tmp_path / "kv" / "p", how)
    with pytest.raises(StartError, match=r"^SSD tier in .*/kv/p cannot be used: ") as caught:
        opened(ran_before=False)
    assert caplog.messages == []
    store = opened(ran_before=True)
    assert caplog.messages == [f"{caught.value}; p goes on with DRAM alone until it is started again"]
    stat = store.stat()
    assert stat.degraded and stat.disk.capacity_bytes == 0 and store.recover() == []
    assert store.put(b"block", None, bytes(store.shape.block_bytes)) and store.contains(b"block")
    store.close()
