"""vLLM's connector hooks, in the scheduler and in the worker process, turned into calls of `Planner` and `Worker`.

No hook blocks. vLLM itself carries plans to the worker (`build_connector_meta`) and reports back
(`build_connector_worker_meta`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput

from isthmus_vllm.pages import pages_of
from isthmus_vllm.plans import Plan, Planner, Report, Scheduled, ticket_of
from isthmus_vllm.worker import Worker

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = init_logger("vllm.isthmus")

LAYOUT = "LBNHC"
"""The KV cache layout asked for; any other whose pages are contiguous works too."""
STAGING_BYTES = 512 << 20
TIMEOUT_S = 30.0
_NAMES = ("_name_or_path", "transformers_version")
"""Fields of a model's config that do not change what is computed."""
_SETTINGS = ("socket", "staging_bytes", "timeout_s")
_DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")


@dataclass
class Orders(KVConnectorMetadata):
    """Carries a plan to the worker."""

    plan: Plan


@dataclass
class News(KVConnectorWorkerMetadata):
    """Carries a report to the scheduler."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> News:
        assert isinstance(other, News)
        return News(self.report + other.report)


def refusal(config: VllmConfig, kv: KVCacheConfig) -> str | None:
    """Returns why the connector cannot work in this server, None if it can."""
    transfer, parallel, draft = config.kv_transfer_config, config.parallel_config, config.speculative_config
    assert transfer is not None
    extra = transfer.kv_connector_extra_config
    groups = kv.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    if transfer.kv_load_failure_policy != "recompute":
        return 'kv_load_failure_policy must be "recompute": a load may fail at any time'
    if not (transfer.is_kv_producer and transfer.is_kv_consumer):
        return 'kv_role must be "kv_both"'
    if not isinstance(extra.get("socket"), str):
        return 'kv_connector_extra_config must have "socket", the path of the adapter\'s socket'
    if unknown := sorted(set(extra) - set(_SETTINGS)):
        return f"kv_connector_extra_config has unknown fields: {', '.join(unknown)}"
    if (
        parallel.world_size != 1
        or parallel.data_parallel_size != 1
        or parallel.decode_context_parallel_size != 1
    ):
        return "one rank only: no tensor, pipeline, context or data parallelism"
    if len(groups) != 1 or not isinstance(spec, FullAttentionSpec) or spec.non_causal:
        return "the model must have one KV cache group, of causal full attention"
    if draft is not None and draft.method not in _DRAFTS_WITHOUT_KV:
        return f"speculative decoding by {draft.method} keeps KV of its own, which depends on later tokens"
    return None


def described(model: ModelConfig) -> str:
    """Returns a digest of how a server computes with its weights: its arguments may override the folder's config."""
    own = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NAMES}
    found = {"config": own, "quantization": model.quantization, "dtype": str(model.dtype)}
    text = json.dumps(found, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class IsthmusConnector(KVConnectorBase_V1, SupportsHMA):
    """See the README for its settings. One object in the scheduler's process, another in the worker's."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if (reason := refusal(vllm_config, kv_cache_config)) is not None:
            raise ValueError(f"IsthmusConnector: {reason}")
        self._settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._block_size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._hash_size: int = kv_cache_config.hash_block_size or self._block_size
        self._planner: Planner | None = None
        self._worker: Worker | None = None
        self._requests: dict[str, Request] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that was not saved is computed again, no more

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return LAYOUT

    # In the scheduler's process.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        blocks = gpu_block_pool.blocks

        def pin(ids: Sequence[int]) -> None:
            gpu_block_pool.touch([blocks[block] for block in ids])

        def unpin(ids: Sequence[int]) -> None:
            # The last one first, as vLLM frees its own: a chain must lose its end before its beginning.
            gpu_block_pool.free_blocks([blocks[block] for block in reversed(ids)])

        self._planner = Planner(self._block_size, pin, unpin)

    def on_new_request(self, request: Request) -> None:
        assert self._planner is not None
        try:
            found = ticket_of(request.kv_transfer_params)
        except ValueError as error:
            log.warning_once("isthmus: ill-formed kv_transfer_params are ignored: %s", str(error))
            return
        if found is None or self._is_foreign(request):
            return
        ticket, key = found
        self._requests[request.request_id] = request
        self._planner.begin(request.request_id, ticket, key, request.all_token_ids)

    @staticmethod
    def _is_foreign(request: Request) -> bool:
        """Whether the request's KV depends on more than its tokens, or its tokens may change."""
        has_more = request.lora_request or request.mm_features or request.prompt_embeds is not None
        return bool(has_more or request.prompt_token_ids is None or request.resumable)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._planner is not None
        if request.skip_reading_prefix_cache:
            return 0, False
        num_tokens = self._planner.matched(request.request_id, num_computed_tokens, time.monotonic())
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._planner is not None
        if num_external_tokens:
            self._planner.allocated(request.request_id, num_external_tokens, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        assert self._planner is not None
        state = scheduler_output.kv_connector_block_state
        scheduled = [
            Scheduled(name, request.num_computed_tokens + num_tokens, self._num_hashed(request))
            for name, num_tokens in scheduler_output.num_scheduled_tokens.items()
            if (request := self._requests.get(name)) is not None
        ]
        return Orders(self._planner.step(scheduled, lambda name: state.get_block_ids(name)[0]))

    def _num_hashed(self, request: Request) -> int:
        # vLLM hashes a block once its tokens are final: neither drafts nor places for tokens still to be sampled.
        return len(request.block_hashes) * self._hash_size // self._block_size

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        assert self._planner is not None
        failed = connector_output.failed_recving or ()
        for name in connector_output.finished_recving or ():
            self._planner.loaded(name, whole=name not in failed)
        if isinstance(news := connector_output.kv_connector_worker_meta, News):
            self._planner.reported(news.report, time.monotonic())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._planner is not None
        self._requests.pop(request.request_id, None)
        self._planner.finished(request.request_id)
        return False, None  # what is still being saved is pinned

    def has_pending_push_work(self) -> bool:
        return self._planner is not None and self._planner.has_work

    # In the worker's process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        group = self._kv_cache_config.kv_cache_groups[0]
        layers = [kv_caches[name] for name in group.layer_names]
        pages = pages_of(layers, self._kv_cache_config.num_blocks)
        if pages.slice_bytes != group.kv_cache_spec.page_size_bytes:
            raise ValueError(
                f"IsthmusConnector: a page has {pages.slice_bytes} bytes, not {group.kv_cache_spec.page_size_bytes}"
            )
        settings = self._settings
        self._worker = Worker(
            settings["socket"],
            pages,
            form=self._form(group.layer_names, layers[0].dtype),
            model=self._vllm_config.model_config.model,
            block_size=self._block_size,
            staging_bytes=int(settings.get("staging_bytes", STAGING_BYTES)),
            timeout_s=float(settings.get("timeout_s", TIMEOUT_S)),
        )

    def _form(self, names: Sequence[str], dtype: torch.dtype) -> str:
        """Returns a name for all that decides what a page's bytes mean, besides the weights."""
        layers = [self._vllm_config.compilation_config.static_forward_context[name] for name in names]
        # On CPU the keys are packed for an instruction set.
        kinds = {
            "-".join(filter(None, (layer.get_attn_backend().get_name(), getattr(layer, "isa", None))))
            for layer in layers
        }
        cache = self._vllm_config.cache_config.cache_dtype
        bits = str(dtype).removeprefix("torch.") + ("" if cache == "auto" else f"-{cache}")
        layout = self._kv_cache_config.kv_cache_layout or LAYOUT
        version = vllm.__version__.split("+")[0]  # the rest names the build
        model = described(self._vllm_config.model_config)
        return f"vllm{version}/{'+'.join(sorted(kinds))}/{layout}/{bits}/tp1/{model}"

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._plan())

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        outcomes = self._worker.take_outcomes() if self._worker is not None else {}
        failed = {name for name, is_whole in outcomes.items() if not is_whole}
        return KVConnectorTransferResults(finished_recving=set(outcomes), failed_recving=failed)

    def build_connector_worker_meta(self) -> News | None:
        if self._worker is None or (report := self._worker.take_report()) == Report():
            return None
        return News(report)

    def _plan(self) -> Plan:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders.plan

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads run beside the steps, and a request waits for all of its own

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        pass  # a step's blocks are saved after it

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.stop()
