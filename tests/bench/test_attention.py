"""The benchmark of attention elsewhere on small cases: every side computes the same sums, and bytes are counted."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from rich.console import Console

from isthmus.bench import BenchError, attention, attention_peers
from isthmus.bench.attention import MODELS, Plan, as_json, run, table
from isthmus.bench.attention_peers import Live, Memory
from isthmus.core.blocks import KVLayout
from isthmus.core.node.events import Heard
from isthmus.core.node.letters import Reserved
from isthmus.core.types import NodeId, RequestId, Span

SMALL = Plan((MODELS["smollm2-135m"],), "float32", (1, 3), (64, 256), (2,), num_layers=2, rounds=1)


@pytest.fixture(autouse=True)
def no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SAMPLE_S", 0)


def test_rows_have_times_and_bytes() -> None:
    lines: list[str] = []
    rows = run(SMALL, lines.append)
    cases = [(row.holders, row.batch, row.context) for row in rows]
    assert cases == [(2, batch, n) for batch in (1, 3) for n in (64, 256)]
    for row in rows:
        assert min(row.home, row.local, row.live, row.bare, row.echo) > 0
        assert row.payload == 9 * 64 * 4 + 9 * 65 * 4  # whatever the context
        assert row.payload < row.wire < row.payload + 400
    assert len(lines) == len(rows) and lines[0].startswith("smollm2-135m, batch 1, context 64, 2 holders: ")
    with io.StringIO() as text:
        Console(file=text, width=200).print(table(rows))
        assert "added / least" in text.getvalue()
    assert as_json(rows)[0]["added"] == rows[0].live - rows[0].home


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
        holder, granted = NodeId("holder-0"), Reserved(RequestId("row-0"), True)
        with pytest.raises(BenchError, match=r"no Reserved came in 0\.1 s"):
            live._wait_for(Heard(holder, granted))
        with pytest.raises(BenchError, match=r"granted=False.* in place of Heard"):
            live._facts.put(Heard(holder, Reserved(RequestId("row-0"), False)))
            live._wait_for(Heard(holder, granted))
