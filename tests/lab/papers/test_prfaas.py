"""The case study of Prefill-as-a-Service within its tolerances, from the published inputs and the stated inferences."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.core.cost import compile_cost, curve_of
from isthmus.core.cost.offload import decode_imbalance, prefill_imbalance, work_of
from isthmus.lab.papers.prfaas import case, deployments, sensitivity
from isthmus.lab.papers.prfaas.case import (
    GBPS,
    HOMOGENEOUS,
    LENGTHS_PUBLISHED,
    MEBI,
    NAIVE,
    PRFAAS,
    PROFILE,
    THRESHOLD,
    THROUGHPUT,
)
from isthmus.yaml_file import read_document
from tests.core.cost.test_profiles import PROFILES
from tests.lab.papers.traces import untraced


def ours(name: str) -> dict[tuple[str, str], Any]:
    return {(row["row"], row["column"]): row["ours"] for row in untraced(name)}


def profile(name: str) -> Any:
    (path,) = (path for path in PROFILES if path.stem == name)
    return curve_of(read_document(path).values)


def test_the_three_deployments_bear_what_is_published() -> None:
    published = {"PrfaaS-PD": PRFAAS, "homogeneous PD": HOMOGENEOUS, "naive heterogeneous": NAIVE}
    for name, deployment in case.DEPLOYMENTS.items():
        solution = deployment.solved()
        assert solution.rate == pytest.approx(published[name].rate, rel=0.02)
        assert (solution.num_prefill, solution.num_decode) == (published[name].prefill, published[name].decode)
        instances = deployment.fleet.num_remote + deployment.fleet.num_local
        assert instances == 12


def test_the_best_threshold_and_what_crosses_the_link() -> None:
    solution = case.OFFLOADING.solved()
    assert solution.classes.threshold == pytest.approx(THRESHOLD, rel=0.03)
    assert solution.egress / GBPS == pytest.approx(13, rel=0.06)
    assert solution.classes.share == pytest.approx(0.496, rel=0.01)
    assert solution.remote == pytest.approx(PRFAAS.remote_rate, rel=0.02)
    assert solution.decode == pytest.approx(PRFAAS.decode_rate, rel=0.01)


def test_equations_7_and_8_are_as_near_as_instances_allow() -> None:
    """The published optimum is out of balance by as much: 3.91 against 1.61 + 1.64."""
    solution = case.OFFLOADING.solved()
    assert abs(prefill_imbalance(solution.remote, solution.local, solution.classes.share)) < 0.01
    published = decode_imbalance(PRFAAS.remote_rate, PRFAAS.local_rate, PRFAAS.decode_rate)
    assert decode_imbalance(solution.remote, solution.local, solution.decode) == pytest.approx(
        published, rel=0.02
    )


@pytest.mark.parametrize(
    ("name", "mean_s", "p90_s"),
    [("PrfaaS-PD", 2.22, 3.51), ("homogeneous PD", 4.44, 9.73), ("naive heterogeneous", 1.74, 3.51)],
)
def test_unloaded_ttft(name: str, mean_s: float, p90_s: float) -> None:
    solution = case.DEPLOYMENTS[name].solved()
    assert case.ttft_s(solution.classes.threshold, case.work()) == pytest.approx((mean_s, p90_s), rel=0.04)


def test_the_structure_explains_the_published_sizes() -> None:
    for row, length in zip(PROFILE.values(), case.MEASURED_LENGTHS, strict=True):
        assert case.kv_bytes(length) / MEBI == pytest.approx(row.kv_mib, abs=0.1)
        assert row.kv_mib * MEBI / row.prefill_s / GBPS == pytest.approx(row.gbps, rel=0.01)


def test_h20_is_what_table_6_implies() -> None:
    times = case.h20()
    assert PRFAAS.prefill / times(case.LENGTHS_CASE.mean_below(THRESHOLD)) == pytest.approx(PRFAAS.local_rate)
    assert times(case.LENGTHS_CASE.quantile(0.9)) == pytest.approx(HOMOGENEOUS.ttft_p90_s)
    for length, seconds in {1024: 0.602, 8192: 1.554, 32_768: 5.045, 131_072: 22.57}.items():
        assert times(length) == pytest.approx(seconds, rel=0.002)


def test_profiles_are_those_of_the_study() -> None:
    remote, local = profile("prfaas-1t-h200x8"), profile("prfaas-1t-h20x8")
    fitted = case.curve(case.h200_points(), remote.origin)
    assert remote.error == pytest.approx(fitted.error, abs=1e-4)
    shipped = work_of(compile_cost(remote), compile_cost(local))
    study = case.work()
    for length in (128, 10_000, 131_072):
        assert shipped.remote_s(length) == pytest.approx(study.remote_s(length), rel=1e-4)
        assert shipped.local_s(length) == pytest.approx(study.local_s(length), rel=1e-4)
        assert shipped.kv_bytes(length) == study.kv_bytes(length)
    assert case.OFFLOADING.solved(what=shipped).rate == pytest.approx(PRFAAS.rate, rel=0.02)
    fixed_ps, per_token_ps = compile_cost(local).decode_step_ps(case.DECODE_BATCH)
    assert (case.DECODE_BATCH / (1024 * fixed_ps / 1e12), per_token_ps) == (pytest.approx(case.DECODE_RATE), 0)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Kimi Linear", "kimi-linear-48b"),
        ("MiMo-V2-Flash", "mimo-v2-flash"),
        ("Qwen3.5-397B", "qwen3.5-397b"),
        ("Ring-2.5-1T", "ring-2.5-1t"),
        ("MiniMax-M2.5", "minimax-m2.5"),
        ("Qwen3-235B", "qwen3-235b"),
    ],
)
def test_profiles_of_open_models_give_the_published_throughput(name: str, file: str) -> None:
    cost = compile_cost(profile(f"{file}-h200x8"))
    for length, gbps in zip(LENGTHS_PUBLISHED.values(), THROUGHPUT[name], strict=True):
        size = cost.state_bytes + cost.kv_token_bytes * length
        assert size / (cost.prefill_ns(length, 0) / 1e9) / GBPS == pytest.approx(gbps, rel=1e-3)
    assert [length for length, _ in case.implied_points(name)] == list(LENGTHS_PUBLISHED.values())


def test_throughput_is_not_assumed_to_fall_with_the_length() -> None:
    """For most models it rises first; the grid does not care."""
    rising = compile_cost(profile("minimax-m2.5-h200x8"))
    solution = case.OFFLOADING.solved(what=work_of(rising, compile_cost(profile("prfaas-1t-h20x8"))))
    assert solution.rate > 0 and solution.egress <= 100 * GBPS * (1 + 1e-9)
    assert solution.binds in ("link", "local compute")


def test_no_interpolation_hides_the_result() -> None:
    """Every rule agrees on the split, within 3 % on the rate and the threshold."""
    found = ours("prfaas-interpolation")
    rates = [value for (_, column), value in found.items() if column == "all (req/s)"]
    assert len(rates) == 10 and all(rate == pytest.approx(PRFAAS.rate, rel=0.03) for rate in rates)
    thresholds = [value for (_, column), value in found.items() if column == "threshold (tokens)"]
    assert all(threshold == pytest.approx(THRESHOLD, rel=0.03) for threshold in thresholds)
    assert {value for (_, column), value in found.items() if column == "prefill instances here"} == {3}


def test_the_chosen_rule_predicts_what_it_has_not_seen_far_better_than_lines() -> None:
    found = ours("prfaas-held-out")
    chosen = found["quadratic, least squares in seconds", "mean error (%)"]
    assert 2 * chosen < found["linear", "mean error (%)"]


def test_the_figures_peak_where_they_should() -> None:
    splits = {row: value for (row, _), value in ours("prfaas-splits").items()}
    offloading = {row: value for row, value in splits.items() if row.startswith("PrfaaS")}
    assert max(offloading, key=lambda row: offloading[row]) == "PrfaaS-PD, 3/5"
    assert max(splits.keys() - offloading.keys(), key=lambda row: splits[row]) == "homogeneous PD, 9/3"
    rates = [value for (_, _), value in ours("prfaas-thresholds").items()]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[peak] / rates[peak + 2] > rates[peak] / rates[peak - 1]  # too high costs more than too low


def test_bandwidth_binds_only_below_what_the_optimum_sends() -> None:
    rates = [value for (_, column), value in ours("prfaas-bandwidth").items() if column == "all (req/s)"]
    assert rates == sorted(rates) and rates[-1] == rates[-3] > rates[-4]


def test_means_of_a_class_flatter_every_deployment() -> None:
    found = ours("prfaas-beyond")
    for name in case.DEPLOYMENTS:
        exact = found[f"{name}, distribution", "all (req/s)"]
        assert 0.95 < exact / found[f"{name}, representative lengths", "all (req/s)"] < 1


def test_sizing_and_price() -> None:
    for row in untraced("prfaas-sizing"):
        assert row["ours"] == pytest.approx(row["published"], rel=0.03 if "bound" not in row["row"] else 0.07)
    prices = [value for (_, column), value in ours("prfaas-price").items() if "price of" in column]
    assert prices == pytest.approx([2.05, 2.02, 1.98], abs=0.01)


def test_what_is_inferred_says_so() -> None:
    marked = ("prfaas-implied-prefill", "prfaas-profile", "prfaas-kv-throughput", "prfaas-price")
    for name in marked:
        cells = untraced(name)
        assert any("inferred" in " ".join(map(str, (cell["row"], cell["column"]))) for cell in cells)


def starred(name: str) -> set[tuple[str, str]]:
    return {(row["row"], row["column"]) for row in untraced(name) if row.get("inferred")}


def test_what_hangs_on_an_inferred_input_is_starred() -> None:
    stars, all_of = starred("prfaas-deployments"), set(ours("prfaas-deployments"))
    used = {
        ("PrfaaS-PD", "local prefill (req/s)"),
        ("homogeneous PD", "local prefill (req/s)"),
        ("homogeneous PD", "TTFT P90 (s)"),
        *((name, "decode (req/s)") for name in case.DEPLOYMENTS),
    }
    follows = {("PrfaaS-PD", column) for column in ("all (req/s)", "ratio", "over naive", "threshold (tokens)")}
    follows |= {("homogeneous PD", "all (req/s)"), ("naive heterogeneous", "ratio")}
    assert used | follows <= stars
    free = {("PrfaaS-PD", "remote prefill (req/s)"), ("PrfaaS-PD", "offloaded (%)")}
    free |= {("naive heterogeneous", column) for column in ("all (req/s)", "TTFT mean (s)", "TTFT P90 (s)")}
    assert free <= all_of - stars


@pytest.mark.parametrize("name", case.INFERRED)
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.3])
def test_no_other_change_of_an_inferred_input_moves_what_has_no_star(name: str, factor: float) -> None:
    changed = case.Factors(**{name: factor})
    for table, measure in (
        ("prfaas-deployments", deployments._measure),
        ("prfaas-inferred", sensitivity._measure_inferred),
    ):
        stars, before = starred(table), ours(table)
        for cell in measure(changed):
            assert (cell.row, cell.column) in stars or cell.ours == before[cell.row, cell.column]


def test_what_is_independent_of_the_inferred_inputs_and_what_is_not() -> None:
    """The remote capacity alone agrees within 1.2 %; 5 % on the times it is made of are 3 to 4 % of the rate."""
    found, stars = ours("prfaas-inferred"), starred("prfaas-inferred")
    capacity, reaches, meets, rate = (
        "remote capacity at 19,400 tokens (req/s)",
        "remote capacity reaches 3.24 req/s at (tokens)",
        "remote capacity meets local capacity at (tokens)",
        "all (req/s)",
    )
    assert found["as it is", capacity] == pytest.approx(3.256, abs=5e-4)
    assert (found["as it is", reaches], found["as it is", meets]) == (19_161, 19_388)
    assert {column for _, column in stars} == {meets, rate, "ratio", "over naive"}
    rates = {row: value for (row, column), value in found.items() if column == rate}
    assert rates == pytest.approx(
        {
            "as it is": 3.252,
            "times on H200 -5 %": 3.386,
            "times on H200 +5 %": 3.133,
            "times on H20 -5 %": 3.289,
            "times on H20 +5 %": 3.216,
            "decode times -5 %": 3.289,
            "decode times +5 %": 3.252,
        },
        abs=5e-4,
    )


def test_local_capacity_at_the_published_threshold_is_the_published_one() -> None:
    """Why the threshold, the rate and its ratios are no test: the other curve goes through them by construction."""
    solution = case.OFFLOADING.solved()
    assert (solution.classes.threshold, solution.binds) == (THRESHOLD, "local compute")
    assert solution.rate == pytest.approx(PRFAAS.local_rate / (1 - solution.classes.share))
