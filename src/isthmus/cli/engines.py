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
from isthmus.engine.interface import Engine
from isthmus.engine.spec import load_json, read_spec
from isthmus.errors import ConfigError
from isthmus.types import Role

MAX_EMULATED_TOKENS = 1 << 23
_NUMBER = re.compile(r"[0-9]+e[+-]?[0-9]+", re.IGNORECASE)
_COST_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Served:
    """What is known of the served model before any node runs.

    `kv_tokens`: that a node's KV memory holds, in whole blocks; `host_bytes`: memory that one node will take.
    """

    tokenizer: Path
    vocab_size: int
    max_length: int
    kv_tokens: int
    host_bytes: int


def at_home(config: Config, file: Path | None) -> Config:
    """The same with `engine.cost`, when it names a file, found from the folder of the configuration file."""
    if file is None or not isinstance(config.engine.cost, str):
        return config
    cost = str(file.parent / Path(config.engine.cost).expanduser())
    return config.model_copy(update={"engine": config.engine.model_copy(update={"cost": cost})})


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
    kv_tokens = config.engine.kv_memory // layout.block_bytes * layout.block_size
    return Served(folder, spec.vocab_size, spec.max_length, kv_tokens, weights + config.engine.kv_memory)


def _emulated_model(config: Config, folder: Path) -> Served:
    tokenizer = tokenizer_folder(folder)
    roles = [nodes for nodes in (config.roles.prefill, config.roles.decode, config.roles.mixed) if nodes.count]
    layout = emulated.layout_of(config.engine.block_size)
    counts = [_emulated_blocks(config, _emulated_cost(config, nodes, folder)) for nodes in roles]
    return Served(
        tokenizer,
        emulated.vocab_of(tokenizer),
        emulated.length_of(folder),
        min(counts) * layout.block_size,
        max(counts) * layout.block_bytes,
    )


def _emulated_blocks(config: Config, cost: Cost) -> int:
    """Blocks of the emulated model that `engine.kv_memory` holds, or that weights leave room for when it is not
    given: so many that no demo model fills the host's memory."""
    token_bytes = compile_cost(cost).kv_token_bytes
    if "kv_memory" in config.engine.model_fields_set or not isinstance(cost, Analytic):
        return config.engine.kv_memory // (token_bytes * config.engine.block_size)
    return min(cost.kv_capacity_tokens, MAX_EMULATED_TOKENS) // config.engine.block_size


def tokenizer_folder(folder: Path) -> Path:
    """The model's own folder; the demo model's when an emulated model brings no tokenizer."""
    return folder if (folder / "tokenizer.json").is_file() else demo_folder()


def cost_of(config: Config, role: Role, folder: Path) -> Cost:
    """What work takes on a node of this role. Raises ConfigError for a curve, hardware or model without one."""
    nodes: RoleConfig = getattr(config.roles, role)
    if config.engine.kind == "emulated":
        return _emulated_cost(config, nodes, folder)
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


def open_engine(config: Config, folder: Path, threads: int, cost: Cost) -> Engine:
    """A node's engine. Only a torch engine loads torch. Raises ModelError, ConfigError or StartError."""
    if config.engine.kind == "emulated":
        return _open_emulated(config, folder, cost)
    from isthmus.engine import engine as torch_engine

    return torch_engine.Engine(
        folder,
        torch_engine.EngineOptions(
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
    num_blocks, length = _emulated_blocks(config, cost), emulated.length_of(folder)
    return emulated.PacedEngine(
        recipe, compile_cost(cost), num_blocks, max_length=min(config.engine.max_length or length, length)
    )
