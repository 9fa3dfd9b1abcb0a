"""A finished simulation as one HTML page that needs no network and no script."""

from isthmus.lab.sim.report.html import write_report

__all__ = ["write_report"]
