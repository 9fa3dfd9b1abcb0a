"""The curve that `isthmus profile` writes is the one that `engine.cost` reads, live and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.models import make_random_model
from isthmus.cli.main import app
from isthmus.config import load_config
from isthmus.core.cost import Curve, curve_of
from isthmus.core.errors import ConfigError
from isthmus.facts import cost_of
from isthmus.lab.sim.deployment import deployment_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    make_random_model(
        folder,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        dtype="float32",
        max_position_embeddings=128,
    )
    return folder


def profiled(model: Path, *arguments: str) -> str:
    options = ("--kv-memory", "4MiB", "--rounds", "1", "--threads", "1")
    done = CliRunner().invoke(app, ["profile", "--model", str(model), *options, *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_both_worlds_read_what_was_written(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "curve.yaml"
    assert profiled(model, "--out", str(file)) == ""
    curve = curve_of(yaml.safe_load(file.read_text()))
    assert (curve.num_layers, curve.kv_token_bytes) == (2, 2 * 2 * 16 * 4)
    assert curve.error is not None
    config = load_config(None, {"engine.cost": str(file)})
    assert cost_of(config, config.roles.prefill, model) == curve
    relative = load_config(None, {"engine.cost": file.name})
    assert {node.cost for node in deployment_of(relative, 16, tmp_path).nodes} == {curve}
    assert isinstance(curve_of(yaml.safe_load(profiled(model))), Curve), "without a file it is printed"
    done = CliRunner().invoke(app, ["profile", "--out", str(tmp_path / "no" / "curve.yaml")])
    assert isinstance(done.exception, ConfigError) and "no folder" in str(done.exception)
