"""From the configuration to a node's engine, torch or emulated, and to what it costs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isthmus.blocks import KVLayout
from isthmus.cli.models import demo_folder
from isthmus.config import Config, RoleConfig
from isthmus.cost import (
    HARDWARE,
    Analytic,
    Cost,
    compile_cost,
    curve_of,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.engine import emulated
from isthmus.engine.spec import load_json, read_spec
from isthmus.errors import ConfigError
from isthmus.types import Role

_NUMBER = re.compile(r"[0-9]+e[+-]?[0-9]+", re.IGNORECASE)
_COST_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Served:
    """What is known of the served model before any node runs.

    `token_bytes`: KV of one token, as `engine.kv_memory` counts; `host_bytes`: memory that one node will take.
    """

    tokenizer: Path
    vocab_size: int
    max_length: int
    token_bytes: int
    host_bytes: int

    def fitting_tokens(self, config: Config) -> int:
        """Tokens in the whole blocks that `engine.kv_memory` holds."""
        size = config.engine.block_size
        return config.engine.kv_memory // (self.token_bytes * size) * size


def served_model(config: Config, folder: Path) -> Served:
    """Raises ModelError or ConfigError for a model that the engine cannot serve."""
    return _emulated_model(config, folder) if config.engine.kind == "emulated" else _torch_model(config, folder)


def _torch_model(config: Config, folder: Path) -> Served:
    spec = read_spec(folder)
    layout = KVLayout(
        dtype=config.engine.dtype or spec.dtype,
        block_size=config.engine.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    token_bytes = layout.block_bytes // layout.block_size
    host_bytes = weights + config.engine.kv_memory
    return Served(folder, spec.vocab_size, spec.max_length, token_bytes, host_bytes)


def _emulated_model(config: Config, folder: Path) -> Served:
    tokenizer = tokenizer_folder(folder)
    roles = [nodes for nodes in (config.roles.prefill, config.roles.decode, config.roles.mixed) if nodes.count]
    token_bytes = max(compile_cost(_emulated_cost(config, nodes, folder)).kv_token_bytes for nodes in roles)
    layout = emulated.layout_of(config.engine.block_size)
    num_blocks = config.engine.kv_memory // (token_bytes * layout.block_size)
    return Served(
        tokenizer,
        emulated.vocab_of(tokenizer),
        emulated.length_of(folder),
        token_bytes,
        num_blocks * layout.block_bytes,
    )


def tokenizer_folder(folder: Path) -> Path:
    """The model's own folder; the demo model's when an emulated model brings no tokenizer."""
    return folder if (folder / "tokenizer.json").is_file() else demo_folder()


def cost_of(config: Config, role: Role, folder: Path) -> Cost | None:
    """What work takes on a node of this role; None when nobody said on which hardware it runs.

    Raises ConfigError for a curve, hardware or model that cannot be read.
    """
    nodes: RoleConfig = getattr(config.roles, role)
    if config.engine.kind == "emulated":
        return _emulated_cost(config, nodes, folder)
    if config.engine.cost is None and _hardware(config, nodes) is None and "cpu" not in HARDWARE:
        return None
    return _cost(config, nodes, folder, default="cpu")


def _emulated_cost(config: Config, nodes: RoleConfig, folder: Path) -> Cost:
    if config.engine.cost is None and _hardware(config, nodes) is None:
        raise ConfigError(
            "the emulated engine needs engine.hardware (--hardware), e.g. h200, or a curve in engine.cost; "
            f"hardware: {', '.join(HARDWARE)}"
        )
    return _cost(config, nodes, folder, default="")


def _hardware(config: Config, nodes: RoleConfig) -> str | None:
    return nodes.hardware or config.engine.hardware


def _cost(config: Config, nodes: RoleConfig, folder: Path, *, default: str) -> Cost:
    engine = config.engine
    if engine.cost is not None:
        return curve_of(_curve_values(engine.cost))
    hardware = hardware_named(_hardware(config, nodes) or default)
    facts = facts_of(load_json(folder / "config.json"))
    weight_dtype = _COST_DTYPES[engine.dtype] if engine.dtype else facts.weight_dtype
    return Analytic(
        model=facts,
        hardware=hardware,
        coefficients=engine_coefficients(engine.runtime, hardware),
        num_gpus=nodes.gpus or engine.gpus,
        weight_dtype=weight_dtype,
        kv_dtype="fp32" if weight_dtype == "fp32" else "bf16",
    )


def _curve_values(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return _numbers(given)
    try:
        values = yaml.safe_load(Path(given).expanduser().read_text(encoding="utf8"))
    except OSError as error:
        raise ConfigError(f"engine.cost: {given} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.cost: {given} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"engine.cost: {given} holds no cost curve; expected keys and values")
    return _numbers(values)


def _numbers(value: Any) -> Any:
    """YAML takes 1e-5, which is how JSON and Python write it, for a text; 1.0e-5 only for a number."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value


def open_engine(config: Config, folder: Path, threads: int, cost: Cost | None) -> Any:
    """The node's engine. Only a torch engine loads torch. Raises ModelError, ConfigError or StartError."""
    if config.engine.kind == "emulated":
        assert cost is not None
        return _open_emulated(config, folder, cost)
    from isthmus.engine.engine import Engine, EngineOptions

    return Engine(
        folder,
        EngineOptions(
            dtype=config.engine.dtype,
            device=config.engine.device,
            threads=threads,
            block_size=config.engine.block_size,
            kv_bytes=config.engine.kv_memory,
            max_length=config.engine.max_length,
        ),
    )


def _open_emulated(config: Config, folder: Path, cost: Cost) -> emulated.PacedEngine:
    recipe = emulated.recipe_of(folder, tokenizer_folder(folder), config.engine.block_size)
    node_cost = compile_cost(cost)
    num_blocks = config.engine.kv_memory // (node_cost.kv_token_bytes * config.engine.block_size)
    length = emulated.length_of(folder)
    return emulated.PacedEngine(
        recipe, node_cost, num_blocks, max_length=min(config.engine.max_length or length, length)
    )
