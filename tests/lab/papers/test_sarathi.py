"""SARATHI's tables: within 5 % where its own times are printed, in its order where they are not."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.lab.papers.sarathi import one_node, tables
from isthmus.lab.papers.sarathi.one_node import WHOLE, BatchLimits, PaperRequest
from isthmus.lab.papers.sarathi.tables import BatchShape, apart, decode_speed_up, gain, peak, piped, run
from tests.lab.papers.traces import untraced


def cells(name: str) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Of a table, by row and column: what is published, and ours."""
    return {(row["row"], row["column"]): (row["published"], row["ours"]) for row in untraced(name)}


GAIN = "throughput (times)"


def difference(table: str, row: str, column: str = GAIN) -> float:
    published, ours = cells(table)[row, column]
    return ours / published - 1


def ours(table: str, row: str, column: str = GAIN) -> float:
    return cells(table)[row, column][1]


@pytest.mark.parametrize("length", ["1K", "2K", "3K"])
def test_the_peaks_of_table_4_come_out(length: str) -> None:
    assert abs(difference("sarathi-throughput", f"13B on A6000, {length}")) < 0.05


@pytest.mark.parametrize("length", [1024, 2048, 3072])
def test_balanced_batches_gain_what_is_published(length: int) -> None:
    assert abs(difference("sarathi-balance", f"chunks of 256, {length} tokens")) < 0.05


@pytest.mark.parametrize("budget", [256, 512])
def test_the_gain_peaks_where_all_decodes_find_a_chunk(budget: int) -> None:
    published, found = cells("sarathi-balance")[f"peak of chunks of {budget}", "P:D"]
    assert abs(found - published) <= 2 and found == peak(budget)
    assert abs(difference("sarathi-balance", f"peak of chunks of {budget}")) < 0.05


def test_whole_prompts_beside_decodes_gain_less_as_published() -> None:
    assert abs(difference("sarathi-balance", "Orca at best")) < 0.05


def test_with_the_best_chunk_no_ratio_loses() -> None:
    away = {row: value for (row, _), (_, value) in cells("sarathi-balance").items() if "best chunk" in row}
    assert len(away) == 6 and min(away.values()) > 1.1
    assert gain(BatchShape(1024, 18, 80), one_node.step_ps, 256) < 1, "one chunk size for all would"


def test_chunks_that_end_with_a_tile_gain_more() -> None:
    """256 beats 320; and one row more than a tile costs most of the gain."""
    shape = BatchShape(1024, 18, 14)
    assert gain(shape, one_node.step_ps, 256) > gain(shape, one_node.step_ps, 320)
    assert gain(shape, one_node.step_ps, 257) < gain(shape, one_node.step_ps, 256) - 0.1


def test_batches_are_as_the_paper_forms_them() -> None:
    batches = run(BatchShape(1024, 6, 50), one_node.step_ps, 256).batches
    middle = batches[len(batches) // 2 : -60]
    assert {batch.num_decodes for batch in middle} <= {5, 6}
    assert {sum(count for count, _ in batch.chunks) for batch in middle if batch.chunks} == {251}
    for batch in run(BatchShape(1024, 6, 50), apart(one_node.step_ps), WHOLE).batches:
        chunks = one_node.step_ps(batch.chunks, 0, 0) if batch.chunks else 0
        decodes = one_node.step_ps((), batch.num_decodes, batch.context) if batch.num_decodes else 0
        assert batch.took_ps == chunks + decodes


def test_two_efficiencies_are_fitted_to_one_row_and_to_no_other() -> None:
    def error(matmul: float, weight_read: float) -> float:
        step, shape = tables.step_33b(matmul, weight_read), tables.CALIBRATED
        found = decode_speed_up(shape, step, 256) / 3.83, gain(shape, step, 256) / 1.25
        return sum((ratio - 1) ** 2 for ratio in found)

    fitted = error(tables.MATMUL, tables.WEIGHT_READ)
    for matmul, weight_read in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01)):
        assert fitted < error(tables.MATMUL + matmul, tables.WEIGHT_READ + weight_read)
    assert abs(difference("sarathi-throughput", "33B on A100, 2K")) < 0.05


def test_the_anchors_are_the_printed_times() -> None:
    assert one_node.step_ps([(1024, 0)], 0, 0) == 234_800_000_000
    assert one_node.step_ps([], 4, 4096) == 49_960_000_000
    assert [one_node.linear_ms(rows) for rows in (0, 1, 128, 129, 256, 257, 384)] == [
        0.0, 55.0, 55.0, 69.8, 69.8, 92.33, 92.33,
    ]  # fmt: skip
    assert one_node.linear_ms(2048) == 2 * one_node.linear_ms(1024)
    halves = one_node.attention_ms([(512, 0)], 0) + one_node.attention_ms([(512, 512)], 0)
    assert halves == pytest.approx(one_node.attention_ms([(1024, 0)], 0))


@pytest.mark.parametrize("trace", ["chat", "summarisation"])
def test_each_half_alone_loses_what_the_other_brings(trace: str) -> None:
    hybrid, chunked, both = (
        [ours("sarathi-ablation", f"{trace}, {row}", column) for column in ("TTFT P50 (s)", "TBT P99 (s)")]
        for row in ("hybrid batches only", "chunked prefills only", "both")
    )
    assert hybrid[0] < both[0] < chunked[0]
    assert both[1] < chunked[1] < hybrid[1] / 2


def test_equal_batches_leave_fewer_bubbles() -> None:
    assert ours("sarathi-bubbles", "median bubble time of a request", "times") > 2
    for other in ("TP-PP with whole prompts", "tensor parallelism only"):
        assert ours("sarathi-bubbles", f"throughput over {other}", "times") > 1.2


def test_bubbles_by_hand() -> None:
    """Two micro-batches of a prompt, 80 a stage, and a decode, 10 a stage, through eight stages.

    The first prompt finds stage s idle for 80 s, the second follows without a gap. The first decode enters stage 0 at
    640, which the second prompt left at 160, and catches up with it at the last stage: 480, 410, ... 60 and 0. The
    second enters when its prompt is through, at 720, and finds each stage idle for 70, the last for 60.
    """

    def step_ps(chunks: Any, num_decodes: int, context: int) -> int:
        return 640 if chunks else 80

    found = piped([[PaperRequest(5, 2)], [PaperRequest(5, 2)]], step_ps, BatchLimits(WHOLE, 1))
    assert found.bubbles_ps == [80 * 28 + 1890, 0 + 7 * 70 + 60]
    assert found.took_ps == 800
