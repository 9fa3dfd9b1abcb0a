"""Profiles of an engine and of a server: the fit finds the curve behind measurements, and both are measured whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models import make_random_model
from isthmus.bench.profile import DECODE_STEPS, Case, cases_of, fit_profile, profile_engine, profile_server
from isthmus.core.blocks import KVLayout
from isthmus.core.cost import Curve, compile_cost, curve_of, to_mapping
from isthmus.core.errors import StartError
from isthmus.core.types import FinishReason
from isthmus.live.engine.engine import EngineOptions
from isthmus.live.servers.client import Computed, EngineError, Token
from tests.live.engine.hybrids import save_tiny

TRUTH = Curve(
    kv_token_bytes=2048,
    num_layers=4,
    prefill_fixed_s=4e-3,
    prefill_token_s=5e-5,
    prefill_pair_s=2e-8,
    decode_points=((1, 1e-3), (2, 1.1e-3), (4, 1.4e-3), (8, 2e-3), (16, 3e-3), (32, 5e-3)),
    decode_context_points=((1, 3e-7), (2, 4e-7), (4, 5e-7), (8, 6e-7), (16, 7e-7), (32, 8e-7)),
)


def measured(max_length: int) -> list[Case]:
    cost = compile_cost(TRUTH)
    return [replace(case, seconds=case.predicted_s(cost)) for case in cases_of(max_length, 1 << 20)]


def test_the_curve_behind_exact_measurements_is_found() -> None:
    found = fit_profile(measured(4096), 2048, 4, "made up")
    curve = found.curve
    assert curve.prefill_fixed_s == pytest.approx(TRUTH.prefill_fixed_s, rel=1e-3)
    assert curve.prefill_token_s == pytest.approx(TRUTH.prefill_token_s, rel=1e-3)
    assert curve.prefill_pair_s == pytest.approx(TRUTH.prefill_pair_s, rel=1e-3)
    for fitted, true in zip(curve.decode_points, TRUTH.decode_points, strict=True):
        assert fitted == pytest.approx(true, rel=1e-3)
    assert max(found.prefill_error_percent, found.decode_error_percent, found.mixed_error_percent or 0) < 0.1
    assert (curve.measured_batch, curve.measured_tokens) == (32, 4096)
    assert curve_of(to_mapping(curve)) == curve


def test_noise_never_makes_a_larger_batch_cheaper() -> None:
    cases = [
        replace(case, seconds=case.seconds / 2) if case.num_decodes == 8 else case for case in measured(4096)
    ]
    curve = fit_profile(cases, 2048, 4, "made up").curve  # building the curve checks the order
    times = [seconds for _, seconds in curve.decode_points]
    assert times == sorted(times)


def test_cases_fit_model_and_memory() -> None:
    cases = cases_of(1024, 8192)
    assert max(case.num_tokens + case.cached for case in cases) <= 1024
    assert max(case.context for case in cases) + DECODE_STEPS <= 1024
    assert max(case.tokens() for case in cases) <= 8192
    assert {case.num_decodes for case in cases} >= {1, 2, 4, 8}


def test_a_real_engine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its iterations take, and what moving KV takes beside it."""
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    make_random_model(tmp_path, **shape, dtype="bfloat16", max_position_embeddings=256)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(torch.get_num_threads() + 1))
    found = profile_engine(tmp_path, EngineOptions(kv_bytes=8 << 20), rounds=1)
    assert all(case.seconds > 0 for case in found.cases)
    assert {case.num_tokens for case in found.cases} == {0, 64, 128, 256}
    assert (found.curve.num_layers, found.curve.kv_token_bytes) == (2, 2 * 2 * 16 * 2)
    assert (found.curve.query_elements, found.curve.query_heads) == (2 * 2 * 16, 2 * 2)
    assert compile_cost(found.curve).prefill_ns(64, 0) > 0
    assert tmp_path.name in found.curve.origin
    spare = found.curve.handling
    assert not spare.shares_core
    sends, receives = spare.send_layer_s + spare.send_byte_s, spare.receive_layer_s + spare.receive_byte_s
    assert min(spare.load_byte_s, spare.save_byte_s, sends, receives, spare.message_s) > 0
    assert spare.zstd is not None and spare.int8 is not None
    assert 0.3 < spare.zstd.kept < 1.1
    assert spare.int8.kept == pytest.approx(18 / 32, rel=0.02)


def test_rows_of_a_model_with_recurrent_layers_have_states_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("qwen3_next", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(torch.get_num_threads()))
    found = profile_engine(tmp_path, EngineOptions(kv_bytes=4 << 20, max_length=128), rounds=1)
    assert max(case.num_decodes for case in found.cases) > 1
    assert found.curve.handling.send_layer_s + found.curve.handling.send_byte_s > 0
    assert found.curve.handling.shares_core, "its threads take all cores there are"


LAYOUT = KVLayout("float32", 16, 3, 2, 16)


class Server:
    """A client of nobody: takes a moment for each prompt and token."""

    url = "http://there"

    def __init__(self, *, refuses: bool = False) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.most = self._running = 0
        self.closed = False
        self._refuses = refuses

    async def compute(self, key: str, body: dict[str, Any]) -> Computed:
        if self._refuses:
            raise EngineError("no")
        self.prompts.append(tuple(body["prompt"]))
        await asyncio.sleep(0.0005)
        return Computed(0, None)

    async def answer(
        self, key: str, body: dict[str, Any], num_top: int | None
    ) -> AsyncGenerator[list[Token], None]:
        self._running += 1
        self.most = max(self.most, self._running)
        for at in range(body["max_tokens"]):
            await asyncio.sleep(0.0002)
            last = at + 1 == body["max_tokens"]
            yield [Token(5, finish=FinishReason.LENGTH if last else None)]
        self._running -= 1

    async def close(self) -> None:
        self.closed = True


def profiled(server: Server) -> Any:
    return profile_server(
        lambda: server,  # type: ignore[arg-type, return-value]
        LAYOUT, vocab_size=99, max_length=200, kv_tokens=4096, max_sequences=4, origin="here", rounds=1,
    )  # fmt: skip


def test_a_curve_of_what_was_measured() -> None:
    server = Server()
    found = profiled(server)
    assert server.closed and server.most == 4
    prompts = [prompt for prompt in server.prompts if len(prompt) in (64, 128)]
    assert len(set(prompts)) == len(prompts), "nothing that is measured may be cached"
    assert all(3 <= token < 99 for prompt in server.prompts for token in prompt)
    assert (found.curve.num_layers, found.curve.kv_token_bytes) == (3, 3 * 256)
    assert [size for size, _ in found.curve.decode_points] == [1, 2, 4]
    assert found.mixed_error_percent is None and all(case.seconds > 0 for case in found.cases)


def test_a_server_that_does_not_answer() -> None:
    server = Server(refuses=True)
    with pytest.raises(StartError, match="vLLM at http://there: no"):
        profiled(server)
    assert server.closed
