"""How far an estimate can be trusted: the error to print beside it, and what lies outside the measurements."""

from __future__ import annotations

from isthmus.cost.analytic import Analytic
from isthmus.cost.node_cost import Cost

_DENSE_ERROR = 0.10
_UNCALIBRATED_ERROR = 0.30
_BATCHES = (4, 128)
_MAX_CONTEXT = 9_200
_PROMPTS = (900, 8_200)
_MAX_GPUS = 8


def expected_error(cost: Cost) -> float | None:
    """Mean relative error to expect, as a share; None when nothing is known.

    Dense models on NVIDIA GPUs: 0.10. Mixture-of-experts, latent and recurrent models without coefficients of
    their own: 0.30 (docs/cost-model.md, section 4). A curve: its error against its own measurements. Estimates
    for a CPU were never measured: use a curve.
    """
    if not isinstance(cost, Analytic):
        return cost.error
    model = cost.model
    if cost.hardware.generation == "cpu":
        return None
    calibrated = not (model.moe_layers or model.latent or model.state_bytes)
    return _DENSE_ERROR if calibrated else _UNCALIBRATED_ERROR


def outside(cost: Cost, *, batch: int = 0, context: int = 0, prompt: int = 0) -> list[str]:
    """What of a use lies outside the measurements behind `cost`, one line each; 0 leaves a value unchecked.

    `batch`: sequences decoded together; `context`: the longest sequence; `prompt`: the longest prompt, in
    tokens.
    """
    if not isinstance(cost, Analytic):
        longest = max(context, prompt)
        limits = (("batch", batch, cost.measured_batch), ("context", longest, cost.measured_tokens))
        return [
            f"{name} {value} is above the largest one measured, {limit}"
            for name, value, limit in limits
            if limit and value > limit
        ]
    found = []
    if batch and not _BATCHES[0] <= batch <= _BATCHES[1]:
        found.append(f"batch {batch} is outside the validated {_BATCHES[0]} to {_BATCHES[1]}")
    if context > _MAX_CONTEXT:
        found.append(f"context {context} is above the validated {_MAX_CONTEXT} tokens")
    if prompt and not _PROMPTS[0] <= prompt <= _PROMPTS[1]:
        found.append(f"prompt length {prompt} is outside the validated {_PROMPTS[0]} to {_PROMPTS[1]} tokens")
    if cost.num_gpus > _MAX_GPUS:
        found.append(f"{cost.num_gpus} GPUs in one tensor-parallel group are above the validated {_MAX_GPUS}")
    if cost.num_gpus > 1 and cost.hardware.link_bw <= cost.hardware.pcie_bw:
        found.append(f"tensor parallelism over PCIe ({cost.hardware.name}) is not validated")
    if cost.model.moe_layers:
        found.append("mixture-of-experts coefficients are defaults unless they were fitted to this engine")
    return found
