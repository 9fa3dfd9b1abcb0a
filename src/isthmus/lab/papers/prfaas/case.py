"""The case study: 32 H200 that only prefill, 64 H20 that do both, 100 Gbps between them, and its two baselines.

Published inputs are in `published`. Inferred, because the paper does not print them:

- **Lengths of Table 5.** Its KV sizes are 17,280 bytes a token (15 MLA layers of 576 values) and 182,353,920 bytes of
  state (42 KDA layers of 64 heads of 128 x 128, with their convolutions) at 1,024, 8,192, 32,000 and 130,000 tokens,
  within 0.1 MiB of what is printed. So the times beside them are taken to be of those lengths.
- **Time between those lengths.** The cost model's own form, a + b l + c l^2 (work for each token, work for each pair of
  tokens), by least squares in seconds, since all times are printed to 0.01 s. On held-out points of it and of the six
  of Table 3 it errs by 6 %, straight lines by 16 % (`prfaas-held-out`); all rules are in `prfaas-interpolation`.
  Both choices were made with Table 6 in view, but their reasons do without it, and one rule holds for every row.
- **Prefill on H20**: the same form through the three times that Table 6 implies.
- **Decode**: 800 tokens/s of an instance, from Table 6; as 20 sequences at the limit of 40 tokens/s.

The last two come from the table of results itself: what hangs on them is no independent test, and marked (`inferred`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec

from isthmus.core.cost import Curve, LogNormal
from isthmus.core.cost.offload import (
    Classes,
    PrefillFleet,
    RequestWork,
    Solution,
    Split,
    bear,
    best,
    decode_rate,
    expected,
    representative,
    solve,
)
from isthmus.lab.papers.prfaas.inferred import AS_IS, Factors
from isthmus.lab.papers.prfaas.interpolation import Points, Times, evaluated, polynomial, quadratic
from isthmus.lab.papers.prfaas.published import (
    GBPS,
    HOMOGENEOUS,
    LINK_GBPS,
    LOCAL_INSTANCES,
    LONGEST,
    MU,
    OUTPUT_TOKENS,
    PRFAAS,
    PROFILE,
    REMOTE_INSTANCES,
    SHORTEST,
    SIGMA,
    THRESHOLD,
    TOKENS_PER_S,
)

TOKEN_BYTES = 15 * 576 * 2
STATE_BYTES = 42 * (64 * 128 * 128 * 4 + 3 * 3 * 64 * 128 * 2)
NUM_LAYERS = 15 + 42
MEASURED_LENGTHS = (1024, 8192, 32_000, 130_000)
DECODE_BATCH = 20

LENGTHS = LogNormal(MU, SIGMA, SHORTEST, LONGEST)
GRID = range(1000, LONGEST, 100)
"""Thresholds that are tried."""
DECODE_RATE = decode_rate(1, DECODE_BATCH, 1 / TOKENS_PER_S, OUTPUT_TOKENS)


def kv_bytes(length: float) -> float:
    return STATE_BYTES + TOKEN_BYTES * length


def h200_points(lengths: Sequence[int] = MEASURED_LENGTHS) -> Points:
    return [(length, row.prefill_s) for length, row in zip(lengths, PROFILE.values(), strict=True)]


def h20_points() -> Points:
    """Equation (4) and Table 6, turned round: two stages and the TTFT that no remote instance and no queue is in."""
    mean = LENGTHS.mean_below(LONGEST)
    return [
        (LENGTHS.mean_below(THRESHOLD), PRFAAS.prefill / PRFAAS.local_rate),
        (mean, HOMOGENEOUS.prefill / HOMOGENEOUS.local_rate),
        (LENGTHS.quantile(0.9), HOMOGENEOUS.ttft_p90_s),
    ]


@cache
def h20() -> Times:
    return evaluated(polynomial(h20_points(), 2))


@cache
def work(h200: Times | None = None) -> RequestWork:
    return RequestWork(h200 or quadratic(h200_points()), h20(), kv_bytes)


def curve(points: Points, origin: str, **decode: Any) -> Curve:
    """A profile by the rule of this study. `decode`: coefficients of its decode, none for prefill instances."""
    fixed_s, token_s, pair_s = polynomial(points, 2)
    fitted = quadratic(points)
    return Curve(
        kv_token_bytes=TOKEN_BYTES,
        state_bytes=STATE_BYTES,
        num_layers=NUM_LAYERS,
        prefill_fixed_s=fixed_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        origin=origin,
        error=sum(abs(fitted(length) / seconds - 1) for length, seconds in points) / len(points),
        measured_tokens=round(points[-1][0]),
        **decode,
    )


class CaseDeployment(msgspec.Struct, frozen=True):
    """One of the three: its instances, and the thresholds it may choose from."""

    fleet: PrefillFleet
    thresholds: Sequence[float]

    def classes(self, by: Split, what: RequestWork) -> list[Classes]:
        return by(LENGTHS, what, self.thresholds)

    def solved(
        self, by: Split = representative, what: RequestWork | None = None, factors: Factors = AS_IS
    ) -> Solution:
        """The best split, and the best threshold where there is a choice."""
        return _solved(self, by, what or work(), factors)

    def held(
        self,
        plan: Solution,
        by: Split = representative,
        what: RequestWork | None = None,
        factors: Factors = AS_IS,
    ) -> Solution:
        """What the threshold and the split of `plan` bear with these inputs."""
        (classes,) = by(LENGTHS, factors.work(what or work()), [plan.classes.threshold])
        return bear(classes, factors.fleet(self.fleet), plan.num_prefill)


@cache
def _solved(deployment: CaseDeployment, by: Split, what: RequestWork, factors: Factors) -> Solution:
    return best(solve(deployment.classes(by, factors.work(what)), factors.fleet(deployment.fleet)))


def fleet(
    *, remote: int = REMOTE_INSTANCES, local: int = LOCAL_INSTANCES, gbps: float = LINK_GBPS
) -> PrefillFleet:
    return PrefillFleet(remote, local, gbps * GBPS, DECODE_RATE)


OFFLOADING = CaseDeployment(fleet(), GRID)
HOMOGENEOUS_PD = CaseDeployment(fleet(remote=0, local=REMOTE_INSTANCES + LOCAL_INSTANCES, gbps=0), (LONGEST,))
"""As many instances, all H20 and in one cluster."""
NAIVE_PD = CaseDeployment(fleet(), (0,))
"""As OFFLOADING, but every request is prefilled remotely, so all H20 decode."""
DEPLOYMENTS = {"PrfaaS-PD": OFFLOADING, "homogeneous PD": HOMOGENEOUS_PD, "naive heterogeneous": NAIVE_PD}


def ttft_s(
    threshold: float, what: RequestWork, transfer_s: Callable[[float], float] = lambda length: 0.0
) -> tuple[float, float]:
    """Mean and 90th percentile of the prefill's own time, no queue; `transfer_s`: added to what is offloaded."""
    remote = RequestWork(lambda length: what.remote_s(length) + transfer_s(length), what.local_s, what.kv_bytes)
    (classes,) = expected(LENGTHS, remote, [threshold])
    mean = classes.share * classes.remote_s + (1 - classes.share) * classes.local_s
    times = sorted(
        remote.remote_s(length) if length > threshold else remote.local_s(length) for length in _sample()
    )
    rank = 9 * len(times) // 10
    return mean, (times[rank - 1] + times[rank]) / 2


@cache
def _sample() -> tuple[float, ...]:
    """Lengths of equal likelihood."""
    return tuple(LENGTHS.quantile((at + 0.5) / 1000) for at in range(1000))
