"""The benchmark of attention elsewhere on small cases: every side computes the same sums, and bytes are counted."""

from __future__ import annotations

import contextlib

import pytest
import torch

from isthmus.bench import BenchError, attention, attention_peers
from isthmus.bench.attention import MODELS, Plan, run
from isthmus.bench.attention_peers import Live, Memory
from isthmus.core.blocks import KVLayout
from isthmus.core.node.events import LetterReceived
from isthmus.core.node.letters import ReserveReply
from isthmus.core.types import NodeId, RequestId, Span

SMALL = Plan((MODELS["smollm2-135m"],), "float32", (1, 3), (64, 256), (2,), num_layers=2, rounds=1)


@pytest.fixture(autouse=True)
def no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SAMPLE_S", 0)


def test_rows_have_times_and_bytes() -> None:
    lines: list[str] = []
    found = run(SMALL, lines.append)
    cases = [(row["holders"], row["batch"], row["context"]) for row in found.json]
    assert cases == [(2, batch, n) for batch in (1, 3) for n in (64, 256)]
    for row in found.json:
        assert min(row[side] for side in ("home", "local", "live", "bare", "echo")) > 0
        assert row["payload"] == 9 * 64 * 4 + 9 * 65 * 4  # whatever the context
        assert row["payload"] < row["wire"] < row["payload"] + 400
        assert row["added"] == row["live"] - row["home"]
    assert len(lines) == len(found.json)
    assert lines[0].startswith("model smollm2-135m, batch 1, context 64, holders 2, ")
    assert "added / least" in [column.name for column in found.tables[0].columns]


def test_cases_too_large_are_left_out() -> None:
    plan = Plan(batches=(1, 8), contexts=(16, 64, 512), most_tokens=512)
    assert list(attention._cases(plan, 2)) == [(1, 64), (1, 512), (8, 64)]


def test_other_sums_are_found_out() -> None:
    sums = [torch.ones(2, 3)]
    attention._verify(1e-5, sums, [sums[0] + 1e-6])
    with pytest.raises(BenchError, match=r"a difference of 0\.5"):
        attention._verify(1e-5, sums, [sums[0] + 0.5])
    with pytest.raises(BenchError, match="nan"):
        attention._verify(1e-5, sums, [sums[0] * float("nan")])


def test_what_a_holder_does_not_say_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(KVLayout("float32", 16, 1, 1, 16), 4, 1, threads=1)
    with contextlib.closing(Live(memory, 1, 1, threads=1)) as live:
        live.place([[Span(0, 4)]])
        monkeypatch.setattr(attention_peers, "LIMIT_S", 0.1)
        holder, granted = NodeId("holder-0"), ReserveReply(RequestId("row-0"), True)
        with pytest.raises(BenchError, match=r"no ReserveReply came in 0\.1 s"):
            live._wait_for(LetterReceived(holder, granted))
        with pytest.raises(BenchError, match=r"granted=False.* in place of LetterReceived"):
            live._facts.put(LetterReceived(holder, ReserveReply(RequestId("row-0"), False)))
            live._wait_for(LetterReceived(holder, granted))
