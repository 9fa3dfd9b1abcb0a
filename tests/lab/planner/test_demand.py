"""Lengths from distributions, files and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.core.cost.lengths import mean_of
from isthmus.core.errors import ConfigError
from isthmus.lab.planner.demand import demand_of_lengths, demand_of_trace
from tests.lab.planner.fleets import config, fleet


def test_the_published_distribution() -> None:
    found = demand_of_lengths("lognormal:mu=9.9,sigma=1,min=128,max=131072", 1024)
    assert mean_of(found.lengths) == pytest.approx(27_486, abs=1)
    assert found.lengths.quantile(0.9) == pytest.approx(62_410, abs=1)
    assert found.context == pytest.approx(27_486 + 512, abs=1)


def test_a_file_with_and_without_answers(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("100,10\n300,30\n")
    found = demand_of_lengths(str(path), None)
    assert mean_of(found.lengths) == 200 and found.output_tokens == 20
    path.write_text("100\n300\n")
    assert demand_of_lengths(str(path), 7).output_tokens == 7


@pytest.mark.parametrize(
    ("text", "output", "says"),
    [
        ("normal:mu=1", 1, "no distribution 'normal'"),
        ("lognormal:mu=9.9,sigma=1,min=128", 1, "needs max too"),
        ("lognormal:mu=9.9,sigma=1,sigma=1,max=9", 1, "'sigma=1'"),
        ("lognormal:mu=9.9,sigma=one,min=1,max=9", 1, "'one' is not a number"),
        ("lognormal:mu=9.9,sigma=0,min=1,max=9", 1, "sigma must be above 0"),
        ("lognormal:mu=9.9,sigma=1,min=9,max=1", 1, "below high"),
        ("4096", None, "--output-tokens"),
        ("0", 1, "a prompt has at least 1 token"),
        ("nowhere.txt", 1, "nowhere.txt: cannot be read"),
        ("{both}", 5, "leave the option or the column out"),
        ("{plain}", None, "--output-tokens"),
        ("{words}", 5, "words.csv:2: expected a prompt's tokens"),
        ("{ragged}", 5, "ragged.csv:2: some lines have"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, text: str, output: int | None, says: str) -> None:
    files = {"both": "100,10\n", "plain": "100\n", "words": "100\nmany\n", "ragged": "100\n100,1\n"}
    for name, content in files.items():
        (tmp_path / f"{name}.csv").write_text(content)
        text = text.replace(f"{{{name}}}", str(tmp_path / f"{name}.csv"))
    with pytest.raises(ConfigError) as caught:
        demand_of_lengths(text, output)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_of_a_trace_only_what_is_not_cached_counts(tmp_path: Path) -> None:
    """The second prompt repeats the first one's block of 512 tokens, the third all of the second's."""
    path = tmp_path / "trace.jsonl"
    prompts = [(0, 512, [1]), (1000, 1024, [1, 2]), (2000, 1024, [1, 2])]
    lines = [
        {"timestamp": at, "input_length": tokens, "output_length": 10, "hash_ids": ids}
        for at, tokens, ids in prompts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = demand_of_trace(path, config(), fleet())
    assert [found.lengths.quantile(share) for share in (0.3, 0.6, 1.0)] == [1, 512, 512]
    assert found.cached == pytest.approx((512 + 1023) / 3)
    assert found.rate == 1.0 and found.output_tokens == 10 and found.workload is not None
