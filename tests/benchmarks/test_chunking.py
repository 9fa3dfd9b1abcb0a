from __future__ import annotations

import pytest

from benchmarks import chunking

Rows = dict[tuple[str, int], chunking.Measured]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return {(row.chunk, row.partial_prefills): row for row in chunking.run()}


def test_a_time_between_tokens_is_kept_and_costs_no_throughput(rows: Rows) -> None:
    for (chunk, partial), row in rows.items():
        if chunk.endswith("ms"):
            limit_ms = int(chunk.removesuffix(" ms"))
            assert 0.95 * limit_ms < row.gap_p99_ms <= limit_ms
            assert row.gap_max_ms < 1.01 * limit_ms, "only the least chunk may miss it, far into a long prompt"
            assert row.busy_s < 1.02 * rows["512 tokens", partial].busy_s


def test_short_prompts_no_longer_wait_for_long_ones(rows: Rows) -> None:
    for chunk in ("512 tokens", "200 ms"):
        order, shared = rows[chunk, 1], rows[chunk, 4]
        assert shared.short_mean_s < order.short_mean_s / 20
        assert shared.long_mean_s < 1.1 * order.long_mean_s
        assert shared.busy_s <= order.busy_s
