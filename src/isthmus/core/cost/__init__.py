"""What work costs: model facts from config.json, hardware facts, engine coefficients, measured curves. Pure.

`Cost` is sent and recorded; `compile_cost(cost)` is asked. Formulas: docs/cost-model.md.
"""

from isthmus.core.cost.analytic import Analytic as Analytic
from isthmus.core.cost.curve import Curve as Curve
from isthmus.core.cost.curve import curve_of as curve_of
from isthmus.core.cost.curve import to_mapping as to_mapping
from isthmus.core.cost.elsewhere import Part as Part
from isthmus.core.cost.elsewhere import Path as Path
from isthmus.core.cost.elsewhere import Queries as Queries
from isthmus.core.cost.elsewhere import Wait as Wait
from isthmus.core.cost.elsewhere import least_bandwidth as least_bandwidth
from isthmus.core.cost.elsewhere import slowest as slowest
from isthmus.core.cost.facts import ModelFacts as ModelFacts
from isthmus.core.cost.facts import facts_of as facts_of
from isthmus.core.cost.hardware import ENGINES as ENGINES
from isthmus.core.cost.hardware import HARDWARE as HARDWARE
from isthmus.core.cost.hardware import Coefficients as Coefficients
from isthmus.core.cost.hardware import Hardware as Hardware
from isthmus.core.cost.hardware import engine_coefficients as engine_coefficients
from isthmus.core.cost.hardware import hardware_named as hardware_named
from isthmus.core.cost.lengths import Lengths as Lengths
from isthmus.core.cost.lengths import LogNormal as LogNormal
from isthmus.core.cost.lengths import Sample as Sample
from isthmus.core.cost.node_cost import Cost as Cost
from isthmus.core.cost.node_cost import NodeCost as NodeCost
from isthmus.core.cost.node_cost import compile_cost as compile_cost
from isthmus.core.cost.node_cost import pipeline as pipeline
from isthmus.core.cost.transfer import Handling as Handling
