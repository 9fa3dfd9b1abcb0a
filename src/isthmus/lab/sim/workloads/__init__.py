"""Sources of requests: published traces, generators, recordings of a live cluster."""

from isthmus.lab.sim.workloads.generators import generate
from isthmus.lab.sim.workloads.load import load, replayed
from isthmus.lab.sim.workloads.workload import Measured, Replay, Request, Workload

__all__ = ["Measured", "Replay", "Request", "Workload", "generate", "load", "replayed"]
