"""What `isthmus serve` refuses to start, in one line."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster.kit import emulated, pooled, written
from tests.models import make_model
from tests.served import given_up, refused


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals") / "tiny"
    make_model(folder, "llama")
    return folder


def links(**clusters: Any) -> dict[str, Any]:
    return emulated(clusters=clusters, links=[{"between": ["west", "east"], "gbps": 1, "rtt_ms": 10}])


P, PD = {"roles": {"prefill": 1}}, {"roles": {"prefill": 1, "decode": 1}}
SETTINGS: list[tuple[dict[str, Any], list[str]]] = [
    (emulated(roles={"prefill": {"count": 3, "pipeline": 2}, "decode": 1}), ["3 nodes make no groups of 2"]),
    (emulated(roles={"prefill": 1, "decode": {"count": 2, "pipeline": 2}}), ["roles.decode.pipeline"]),
    (pooled(tls={"certificate": "a.crt"}), ["tls", "authority"]),
    (links(east=PD, west={}, north=P), ["clusters.north: its prefill nodes need decode nodes there or in"]),
    (links(east=P, west=P), ["no request could be served"]),
    ({"engine": {"kind": "emulated", "cost": "nothing.yaml"}}, ["nothing.yaml: cannot be read"]),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_a_file_that_makes_no_cluster(settings: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    code, line = refused("--config", written(tmp_path, settings), "--port", "0")
    assert code != 0 and all(word in line for word in words)


FLAGS: list[tuple[list[str], list[str]]] = [
    (["--engine", "emulated"], ["engine.hardware", "h200"]),
    (["--engine", "emulated", "--hardware", "h20x"], ["h20x", "h200"]),
    (["--engine", "imagined"], ["engine.kind"]),
    (["--engine", "emulated", "--hardware", "h200", "--model", "BERT/.."], ["config.json"]),
    (["--model", "BERT"], ["BertForMaskedLM", "LlamaForCausalLM"]),
    (["--model", "MODEL", "--kv-memory", "100000TiB"], ["are available"]),
    (["--model", "MODEL", "--kv-memory", "1KiB"], ["fewer than 2 blocks"]),
    (["--model", "MODEL", "--port", "TAKEN"], ["in use"]),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS)
def test_flags_that_make_no_cluster(flags: list[str], words: list[str], model: Path, tmp_path: Path) -> None:
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"MODEL": str(model), "BERT": str(bert), "BERT/..": str(tmp_path)}
        names["TAKEN"] = str(taken.getsockname()[1])
        port = [] if "--port" in flags else ["--port", "0"]
        code, line = refused(*[names.get(flag, flag) for flag in flags], *port)
    assert code != 0 and all(word in line for word in words)


def pickled(model: Path, tmp_path: Path) -> list[str]:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    return ["--model", str(tmp_path)]


@pytest.mark.parametrize("what", ["no model", "weights of pickle", "a disk without a folder"])
def test_what_no_node_can_start_with(what: str, model: Path, tmp_path: Path) -> None:
    arguments, word = {
        "no model": (["--model", str(tmp_path / "nothing")], "no such folder"),
        "weights of pickle": (pickled(model, tmp_path), "pytorch_model.bin"),
        "a disk without a folder": (
            ["--config", written(tmp_path, pooled(cache={"ssd": "1GiB"}))],
            "cache.folder",
        ),
    }[what]
    code, line = given_up(*arguments, "--port", "0")
    assert code != 0 and word in line
