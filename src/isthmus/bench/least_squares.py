"""Bounded least squares over positive values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_STEP = 1e-5
"""Of the logarithms, for differences; they move by at most `_STRIDE` at once."""
_STRIDE = 2.0


def least_squares(
    residuals: Callable[[Sequence[float]], list[float]],
    start: Sequence[float],
    bounds: Sequence[tuple[float, float]],
    *,
    max_iterations: int = 60,
) -> list[float]:
    """Positive values that minimise the sum of squared residuals: Levenberg-Marquardt on their logarithms.

    Values stay within `bounds` by projection; one that rests on a bound and would leave is held there for the step.
    """
    low, high = np.log(np.array(bounds)).T
    point = np.clip(np.log(np.maximum(start, 1e-300)), low, high)

    def at(logs: np.ndarray) -> np.ndarray:
        return np.array(residuals(np.exp(logs).tolist()))

    current, damping = at(point), 1e-3
    for _ in range(max_iterations):
        steps = np.diag(np.where(point + _STEP <= high, _STEP, -_STEP))
        jacobian = np.column_stack([(at(point + step) - current) / step.sum() for step in steps])
        gradient = jacobian.T @ current
        free = ~((point <= low) & (gradient > 0) | (point >= high) & (gradient < 0))
        if not free.any():
            break
        normal, before = jacobian[:, free].T @ jacobian[:, free], current @ current
        while damping < 1e9:
            damped = normal + damping * np.diag(normal.diagonal() + 1e-9)
            step, trial = np.linalg.solve(damped, -gradient[free]), point.copy()
            trial[free] = np.clip(point[free] + np.clip(step, -_STRIDE, _STRIDE), low[free], high[free])
            found = at(trial)
            if found @ found < before:
                point, current, damping = trial, found, max(damping / 5, 1e-9)
                break
            damping *= 4
        if before - current @ current <= 1e-10 * before:
            break
    return np.exp(point).tolist()
