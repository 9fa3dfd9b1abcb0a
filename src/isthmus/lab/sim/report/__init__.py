"""A finished simulation as one HTML page with charts, which needs no network."""

from isthmus.lab.sim.report.report import write_report

__all__ = ["write_report"]
