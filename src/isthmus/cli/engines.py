"""From a node's facts to its engine, torch or emulated, and its store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import blake3
import msgspec

from isthmus.cli.models import bytes_folder
from isthmus.config import Config
from isthmus.core.blocks import KVLayout
from isthmus.core.conductor.lending import longest
from isthmus.core.cost import compile_cost, facts_of
from isthmus.core.errors import ConfigError, ModelError, StartError
from isthmus.core.models import Fields, ModelSpec, read_model, read_quantisation
from isthmus.core.types import NodeId, Role
from isthmus.extras import require
from isthmus.facts import (
    ClusterPlace,
    NodeFacts,
    clusters_of,
    cost_of,
    for_role,
    kv_memory_of,
    role_config,
    role_facts,
)
from isthmus.live.cluster.process import OnLost
from isthmus.live.engine import emulated
from isthmus.live.engine.interface import Engine, split_layers
from isthmus.live.engine.recipe import LAYERS as EMULATED_LAYERS
from isthmus.live.engine.recipe import kv_layout as spec_layout
from isthmus.live.engine.recipe import read_spec
from isthmus.live.store import Arena, Log, RecordFormat, Shape, Store
from isthmus.model_files import open_files
from isthmus.model_files.grammar_limits import GrammarLimits

if TYPE_CHECKING:
    from isthmus.live.servers.process import ServedEngine

logger = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
VLLM_CPU_BLOCK = 128


@dataclass(frozen=True)
class Served:
    """Facts of the served model before any node runs. `kv_tokens`: longest request that fits the KV memory of several
    nodes together, in whole blocks; `node_tokens`: that fits every single node. `no_reuse`: the reason why KV of its
    prompts cannot be moved to other positions, "" if it can."""

    tokenizer: Path
    vocab_size: int
    max_length: int
    kv_tokens: int
    node_tokens: int
    no_reuse: str = ""


def check_installed(config: Config) -> None:
    """Raises ConfigError if nodes that are started here lack torch."""
    kinds = {cluster.config.engine.kind for cluster in clusters_of(config)}
    if config.placement == "local" and "torch" in kinds:
        require("torch", "engine.kind: torch")


def served_model(config: Config, folder: Path, nodes: Sequence[NodeFacts]) -> Served:
    """Raises ModelError or ConfigError for a model that the engine cannot serve."""
    each = min(facts.limits(facts.role).capacity_tokens for facts in nodes)
    clusters = {facts.cluster for facts in nodes}
    joined = [facts.joined() for facts in nodes]
    together = [longest([node for node in joined if node.cluster == cluster]) for cluster in clusters]
    lengths = max(each, *together), each
    if config.engine.kind == "emulated":
        tokenizer = tokenizer_folder(folder)
        why = "the emulated engine has no KV that could be moved"
        return Served(tokenizer, emulated.vocab_of(tokenizer), emulated.length_of(folder), *lengths, why)
    if config.engine.kind == "vllm":
        spec = _vllm_spec(folder)
        _weights_of(folder)
        if all(_finds_memory(config, facts.role) for facts in nodes):
            lengths = 0, 0
        return Served(
            folder, spec.vocab_size, spec.max_length, *lengths, "vLLM computes with the KV of a prefix alone"
        )
    spec = read_spec(folder)
    no_reuse = spec.no_reuse
    if not no_reuse and not any(facts.reuse_layers for facts in nodes):
        no_reuse = "nodes keep no computed KV here; give cache.dram"
    return Served(folder, spec.vocab_size, spec.max_length, *lengths, no_reuse)


def as_computed(config: Config, folder: Path) -> Config:
    """The configuration with the dtype to which the engine widens quantised weights, which is what they cost."""
    engine = config.engine
    if engine.kind != "torch" or engine.dtype is not None:
        return config
    files = open_files(folder)
    if read_quantisation(Fields(files.where("config.json"), files.required_object("config.json"))) is None:
        return config
    return config.model_copy(update={"engine": engine.model_copy(update={"dtype": read_spec(folder).dtype})})


def host_bytes(config: Config, folder: Path, facts: NodeFacts) -> int:
    """Memory that each process of a node will take. `config`: of its cluster."""
    layout, weights = kv_layout(config, folder), 0
    if config.engine.kind == "vllm" and config.engine.device != "cpu":
        assert layout is not None
        return facts.num_slots * layout.block_bytes
    if layout is None:
        layout = _recipe(config, folder, facts).layout
    else:
        weights = _weight_bytes(config, folder) if facts.role is not Role.ATTENTION else 0
    blocks = (facts.kv_blocks + facts.num_slots) * layout.block_bytes // facts.pipeline
    return weights + layout.state_bytes * facts.live_states + blocks


def _weight_bytes(config: Config, folder: Path) -> int:
    """Bytes of the matrices as the engine holds them, whatever their form in files."""
    spec, files = _spec_of(config, folder), open_files(folder)
    facts = facts_of(files.required_object("config.json"), files.where("config.json"))
    head = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    return (4 if (config.engine.dtype or spec.dtype) == "float32" else 2) * (facts.num_params + head)


def kv_layout(config: Config, folder: Path) -> KVLayout | None:
    """KV layout of the model that runs; None for an emulated one, whose block size its cost model says."""
    if config.engine.kind == "emulated":
        return None
    spec = _spec_of(config, folder)
    return spec_layout(spec, config.engine.dtype or spec.dtype, block_size_of(config))


def block_size_of(config: Config) -> int:
    """Tokens of a block. A vLLM server that is not told chooses: 128 on CPUs, mostly 16 elsewhere; where it chose
    otherwise its node counts in its blocks as soon as it runs."""
    engine = config.engine
    chosen = engine.kind == "vllm" and engine.device == "cpu" and "block_size" not in engine.model_fields_set
    return VLLM_CPU_BLOCK if chosen else engine.block_size


def _spec_of(config: Config, folder: Path) -> ModelSpec:
    return _vllm_spec(folder) if config.engine.kind == "vllm" else read_spec(folder)


def _vllm_spec(folder: Path) -> ModelSpec:
    """Spec of a model whose KV is known from its config.json. Raises ModelError."""
    files = open_files(folder)
    spec = read_model(files.required_object("config.json"), files.where("config.json"))
    if spec.recurrent:
        raise ModelError(
            f"{folder}: vLLM nodes serve models that keep KV of every token in every layer, not this one"
        )
    return spec


def _finds_memory(config: Config, role: Role) -> bool:
    """Whether a vLLM server sizes its KV memory itself, unknown until it runs."""
    engine = for_role(config, role).engine
    return engine.device != "cpu" and "kv_memory" not in engine.model_fields_set and engine.hardware is None


def served_length(config: Config, folder: Path, facts: NodeFacts) -> int:
    """Longest request that a node's vLLM server takes; 0: whatever fits its memory."""
    if config.engine.max_length is not None:
        return config.engine.max_length
    if _finds_memory(config, facts.role):
        return 0
    return min(_vllm_spec(folder).max_length, facts.limits(facts.role).capacity_tokens)


def vllm_layout(folder: Path, dtype: str | None, block_size: int) -> KVLayout:
    """KV layout of a model in vLLM. Raises ModelError."""
    spec = _vllm_spec(folder)
    return spec_layout(spec, dtype or spec.dtype, block_size)


def sampled_revision(folder: Path) -> str:
    """A digest of a model's description and of samples spread over its weights. Raises ModelError."""
    files, digest = open_files(folder), blake3.blake3()
    for name in ("config.json", "tokenizer.json"):
        digest.update((files.text(name) or "").encode() + b"\0")
    for path in _weights_of(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\0".encode())
        with path.open("rb") as file:
            for part in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * part // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sampled-{digest.hexdigest(length=16)}"


def _weights_of(folder: Path) -> list[Path]:
    """Files of weights. Raises ModelError for a folder without safetensors."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(
            f"{folder}: vLLM nodes serve a folder with config.json and .safetensors; give one as --model"
        )
    return found


def node_facts(cluster: ClusterPlace, role: Role, folder: Path, node: NodeId) -> NodeFacts:
    """Facts of one node, which may be started by hand. Raises ModelError or ConfigError."""
    config = cluster.config
    cost = cost_of(config, role_config(config, role), folder)
    facts = role_facts(cluster, role, cost, block_size_of(config), kv_layout(config, folder))
    return msgspec.structs.replace(facts, node=node)


def _recipe(config: Config, folder: Path, facts: NodeFacts) -> emulated.Recipe:
    """Recipe of the emulated engine, with recurrent states of the size that the cost model says, in tokens of KV."""
    cost = compile_cost(facts.cost)
    return emulated.recipe_of(
        folder,
        tokenizer_folder(folder),
        facts.block_size,
        layers=_emulated_layers(config),
        state_tokens=-(-cost.state_bytes // cost.kv_token_bytes),
    )


def grammar_limits(config: Config) -> GrammarLimits:
    limits = config.limits
    return GrammarLimits(limits.grammar_bytes, limits.grammar_s, limits.grammar_memory, limits.grammars_memory)


def _emulated_layers(config: Config) -> int:
    """At least one layer for every stage of a pipeline."""
    return max(EMULATED_LAYERS, config.roles.prefill.pipeline)


def tokenizer_folder(folder: Path) -> Path:
    """The model's folder, or that of the byte tokenizer for an emulated model without a tokenizer."""
    return folder if open_files(folder).text("tokenizer.json") is not None else bytes_folder()


def open_engine(config: Config, folder: Path, threads: int, facts: NodeFacts, *, stage: int = 0) -> Engine:
    """A node's engine, or that of one stage of a pipeline. Only a torch engine loads torch. Raises ModelError,
    ConfigError or StartError."""
    make = _open_emulated if config.engine.kind == "emulated" else _open_torch
    engine = make(config, folder, threads, facts, stage)
    if config.network.compression == "int8":  # any block may have lost precision: block names tell them apart
        engine.layout = msgspec.structs.replace(engine.layout, codec="int8")
    return engine


def _open_torch(config: Config, folder: Path, threads: int, facts: NodeFacts, stage: int) -> Engine:
    from isthmus.live.engine import attending
    from isthmus.live.engine import engine as torch_engine

    stages = facts.pipeline
    kind = attending.AttentionEngine if facts.role is Role.ATTENTION else torch_engine.Engine
    return kind(
        folder,
        torch_engine.EngineOptions(
            dtype=config.engine.dtype,
            device=config.engine.device,
            threads=threads,
            block_size=config.engine.block_size,
            kv_bytes=kv_memory_of(config, facts.role, facts.cost),
            max_length=config.engine.max_length,
            layers=split_layers(read_spec(folder).num_layers, stages)[stage] if stages > 1 else None,
            max_sequences=facts.live_states,
            batches=config.engine.batches,
            grammars=grammar_limits(config),
        ),
    )


def _open_emulated(config: Config, folder: Path, threads: int, facts: NodeFacts, stage: int) -> Engine:
    length = emulated.length_of(folder)
    return emulated.PacedEngine(
        _recipe(config, folder, facts),
        compile_cost(facts.cost),
        facts.kv_blocks,
        max_length=min(config.engine.max_length or length, length),
        layers=split_layers(_emulated_layers(config), facts.pipeline)[stage],
        max_sequences=facts.live_states,
        tokenizer=tokenizer_folder(folder),
        grammars=grammar_limits(config),
    )


def store_opener(
    config: Config,
    engine: Engine | ServedEngine,
    layout: KVLayout,
    name: str,
    facts: NodeFacts,
    *,
    ran_before: bool,
) -> Callable[[OnLost], Store] | None:
    """Returns the function that opens the store of a node's cache; None without a cache.

    `name`: folder of its SSD tier. A node that starts for the first time needs a usable folder (else StartError: the
    path may be misspelt); one that `ran_before` goes on with DRAM alone. Raises ConfigError for an SSD tier without a
    folder.
    """
    cache = config.cache
    if not facts.cache_blocks:
        return None
    if facts.ssd_blocks and cache.folder is None:
        raise ConfigError("cache.ssd needs cache.folder: where the blocks are kept")
    fields = (engine.revision.encode(), engine.layout.fingerprint(), repr(engine.layers).encode())
    revision = blake3.blake3(b"/".join(fields)).digest()

    def open_store(on_lost: OnLost) -> Store:
        shape = Shape(layout.num_layers, layout.slice_bytes)
        if cache.folder is None or not facts.ssd_blocks:
            return Store(Arena(shape, facts.num_slots), None, on_lost)
        size, log = RecordFormat(shape, revision).file_bytes(facts.ssd_blocks), None
        try:
            log = Log(Path(cache.folder).expanduser() / name, shape, size, revision)
        except StartError as error:
            if not ran_before:
                raise
            logger.warning("%s; %s goes on with DRAM alone until it is started again", error, name)
        return Store(Arena(shape, facts.num_slots), log, on_lost, lacks_log=log is None)

    return open_store
