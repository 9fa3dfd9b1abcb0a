"""From the configuration to a node's engine, torch or emulated, and to what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec

from isthmus.cli.models import demo_folder
from isthmus.cluster.links import state_slots
from isthmus.cluster.node import OnLost
from isthmus.conductor import Paths
from isthmus.config import Config, RoleConfig
from isthmus.cost import HARDWARE, Analytic, Cost, compile_cost
from isthmus.deploy import cost_of, hardware_of, rates_of
from isthmus.engine import emulated
from isthmus.engine.interface import Engine, split_layers
from isthmus.engine.recipe import LAYERS as EMULATED_LAYERS
from isthmus.engine.spec import read_spec
from isthmus.errors import ConfigError
from isthmus.scheduler import capacity_tokens
from isthmus.store import Arena, Log, RecordFormat, Shape, Store
from isthmus.types import Role

MAX_EMULATED_TOKENS = 1 << 23
MIN_SLOTS = 8


@dataclass(frozen=True)
class Served:
    """What is known of the served model before any node runs.

    `kv_tokens`: the longest request that a node's KV memory holds, in whole blocks; `host_bytes`: memory that one node
    will take.
    """

    tokenizer: Path
    vocab_size: int
    max_length: int
    kv_tokens: int
    host_bytes: int


def served_model(config: Config, folder: Path) -> Served:
    """Raises ModelError or ConfigError for a model that the engine cannot serve."""
    return _emulated_model(config, folder) if config.engine.kind == "emulated" else _torch_model(config, folder)


def _torch_model(config: Config, folder: Path) -> Served:
    spec = read_spec(folder)
    layout = spec.layout(config.engine.dtype or spec.dtype, config.engine.block_size)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    live_bytes = layout.state_bytes * max(state_slots(config, role) for role in _roles(config))
    num_blocks = max(0, config.engine.kv_memory - live_bytes) // layout.block_bytes
    kv_tokens = max(0, capacity_tokens(num_blocks, layout.block_size, layout.state_blocks))
    memory = weights + config.engine.kv_memory + config.cache.dram
    return Served(folder, spec.vocab_size, spec.max_length, kv_tokens, memory)


def _emulated_model(config: Config, folder: Path) -> Served:
    tokenizer = tokenizer_folder(folder)
    recipe = _recipe(config, folder)
    layout = recipe.layout
    costs = [
        (_emulated_cost(config, nodes, folder), nodes.pipeline, state_slots(config, role))
        for role, nodes in _roles(config).items()
    ]
    counts = [_emulated_blocks(config, cost, stages, slots) for cost, stages, slots in costs]
    cached = [config.cache.dram * stages // _block_bytes(config, cost) for cost, stages, _ in costs]
    return Served(
        tokenizer,
        recipe.vocab_size,
        emulated.length_of(folder),
        max(0, capacity_tokens(min(counts), layout.block_size, layout.state_blocks)),
        (max(counts) + max(cached)) * layout.block_bytes,
    )


def _roles(config: Config) -> dict[Role, RoleConfig]:
    """Those that some node has."""
    roles: dict[Role, RoleConfig] = {role: getattr(config.roles, role.value) for role in Role}
    return {role: nodes for role, nodes in roles.items() if nodes.count}


def _recipe(config: Config, folder: Path) -> emulated.Recipe:
    size, layers = config.engine.block_size, _emulated_layers(config)
    return emulated.recipe_of(folder, tokenizer_folder(folder), size, layers=layers)


def _emulated_layers(config: Config) -> int:
    """Every stage of a pipeline has some."""
    return max(EMULATED_LAYERS, config.roles.prefill.pipeline)


def _emulated_blocks(config: Config, cost: Cost, stages: int, slots: int) -> int:
    """Blocks of the emulated model that `engine.kv_memory` holds beside `slots` live states, or that weights leave room
    for when it is not given: so many that no demo model fills the host's memory. A pipeline stage has its layers of
    each block. Raises ConfigError when there is no room for any."""
    model = compile_cost(cost)
    if "kv_memory" in config.engine.model_fields_set or not isinstance(cost, Analytic):
        live_bytes = model.state_bytes * slots
        if live_bytes > config.engine.kv_memory:
            raise ConfigError(
                f"engine.kv_memory {config.engine.kv_memory} bytes does not hold the states of {slots} sequences "
                f"({live_bytes} bytes); give more, or fewer in engine.max_sequences"
            )
        num_bytes = (config.engine.kv_memory - live_bytes) * stages
        return num_bytes // (model.kv_token_bytes * config.engine.block_size)
    return min(cost.kv_capacity_tokens * stages, MAX_EMULATED_TOKENS) // config.engine.block_size


def _block_bytes(config: Config, cost: Cost) -> int:
    """Of a block of the model that is emulated."""
    return compile_cost(cost).kv_token_bytes * config.engine.block_size


def tokenizer_folder(folder: Path) -> Path:
    """The model's own folder; the demo model's when an emulated model brings no tokenizer."""
    return folder if (folder / "tokenizer.json").is_file() else demo_folder()


def node_cost(config: Config, role: Role, folder: Path) -> Cost:
    """What work takes on a node of this role. Raises ConfigError for a curve, hardware or model without one."""
    nodes: RoleConfig = getattr(config.roles, role)
    return (
        _emulated_cost(config, nodes, folder)
        if config.engine.kind == "emulated"
        else cost_of(config, nodes, folder)
    )


def _emulated_cost(config: Config, nodes: RoleConfig, folder: Path) -> Cost:
    if config.engine.cost is None and hardware_of(config, nodes) is None:
        raise ConfigError(
            "the emulated engine needs engine.hardware (--hardware), e.g. h200, or a curve in engine.cost; "
            f"hardware: {', '.join(HARDWARE)}"
        )
    return cost_of(config, nodes, folder)


def open_engine(
    config: Config, folder: Path, threads: int, cost: Cost, *, slots: int, stage: int = 0, stages: int = 1
) -> Engine:
    """A node's engine, with live states for `slots` requests, or that of one stage of a pipeline. Only a torch engine
    loads torch. Raises ModelError, ConfigError or StartError."""
    engine = _open_engine(config, folder, threads, cost, slots, stage, stages)
    if config.network.compression == "int8":  # then any block may have been through it, and its name says so
        engine.layout = msgspec.structs.replace(engine.layout, codec="int8")
    return engine


def _open_engine(
    config: Config, folder: Path, threads: int, cost: Cost, slots: int, stage: int, stages: int
) -> Engine:
    if config.engine.kind == "emulated":
        return _open_emulated(config, folder, cost, slots, stage, stages)
    from isthmus.engine import engine as torch_engine

    layers = split_layers(read_spec(folder).num_layers, stages)[stage] if stages > 1 else None
    return torch_engine.Engine(
        folder,
        torch_engine.EngineOptions(
            dtype=config.engine.dtype,
            device=config.engine.device,
            threads=threads,
            block_size=config.engine.block_size,
            kv_bytes=config.engine.kv_memory,
            max_length=config.engine.max_length,
            layers=layers,
            max_sequences=slots,
        ),
    )


def paths_of(config: Config, role: Role) -> Paths:
    """How fast KV moves to and from a node; without a cache only from prefill to decode. A pipeline group shares its
    cache with nobody."""
    nodes: RoleConfig = getattr(config.roles, role)
    rates = rates_of(config, nodes)
    if not config.cache.dram:
        return Paths(handover=rates.handover or rates.network)
    paths = rates.paths(has_disk=config.cache.ssd > 0)
    return msgspec.structs.replace(paths, network=0) if nodes.pipeline > 1 else paths


def store_opener(
    config: Config, engine: Engine, node: str, cost: Cost, stages: int
) -> Callable[[OnLost], Store] | None:
    """Opens the store of a node's cache, if it has one. An emulated node keeps as many blocks as the model's would fit.

    Raises ConfigError for a cache that holds no block, or an SSD tier without a folder.
    """
    cache, layout, emulates = config.cache, engine.memory.layout, config.engine.kind == "emulated"
    block_bytes = max(1, _block_bytes(config, cost) // stages) if emulates else layout.block_bytes
    num_slots = cache.dram // block_bytes
    if not cache.dram and not cache.ssd:
        return None
    if num_slots < MIN_SLOTS:
        raise ConfigError(
            f"cache.dram: {cache.dram} bytes hold fewer than {MIN_SLOTS} blocks of {block_bytes} bytes; give "
            f"at least {MIN_SLOTS * block_bytes}"
        )
    if cache.ssd and cache.folder is None:
        raise ConfigError("cache.ssd needs cache.folder: where the blocks are kept")
    fields = (engine.revision.encode(), engine.layout.fingerprint(), repr(engine.layers).encode())
    revision = blake3.blake3(b"/".join(fields)).digest()

    def open_store(on_lost: OnLost) -> Store:
        shape = Shape(layout.num_layers, layout.slice_bytes)
        log = None
        if cache.folder is not None and cache.ssd:
            size = cache.ssd
            if emulates:
                size = RecordFormat(shape, revision).file_bytes(cache.ssd // block_bytes)
            log = Log(Path(cache.folder).expanduser() / node, shape, size, revision)
        return Store(Arena(shape, num_slots), log, on_lost)

    return open_store


def _open_emulated(
    config: Config, folder: Path, cost: Cost, slots: int, stage: int, stages: int
) -> emulated.PacedEngine:
    length = emulated.length_of(folder)
    return emulated.PacedEngine(
        _recipe(config, folder),
        compile_cost(cost),
        _emulated_blocks(config, cost, stages, slots),
        max_length=min(config.engine.max_length or length, length),
        layers=split_layers(_emulated_layers(config), stages)[stage],
        max_sequences=slots,
    )
