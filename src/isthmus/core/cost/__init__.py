"""What work costs: model facts from config.json, hardware facts, engine coefficients, measured curves. Pure.

`Cost` is what is sent and recorded; `compile_cost(cost)` is what is asked. Formulas: docs/cost-model.md.
"""

from isthmus.core.cost.analytic import Analytic
from isthmus.core.cost.curve import Curve, curve_of, to_mapping
from isthmus.core.cost.elsewhere import Part, Path, Queries, Wait, least_bandwidth, slowest
from isthmus.core.cost.facts import ModelFacts, facts_of
from isthmus.core.cost.hardware import (
    ENGINES,
    HARDWARE,
    Coefficients,
    Hardware,
    engine_coefficients,
    hardware_named,
)
from isthmus.core.cost.lengths import Lengths, LogNormal, Sample
from isthmus.core.cost.node_cost import Cost, NodeCost, compile_cost, pipeline
from isthmus.core.cost.transfer import Handling

__all__ = [
    "ENGINES",
    "HARDWARE",
    "Analytic",
    "Coefficients",
    "Cost",
    "Curve",
    "Handling",
    "Hardware",
    "Lengths",
    "LogNormal",
    "ModelFacts",
    "NodeCost",
    "Part",
    "Path",
    "Queries",
    "Sample",
    "Wait",
    "compile_cost",
    "curve_of",
    "engine_coefficients",
    "facts_of",
    "hardware_named",
    "least_bandwidth",
    "pipeline",
    "slowest",
    "to_mapping",
]
