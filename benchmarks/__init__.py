"""Measurements against other people's software, validations of ours, and figures behind decisions.

Not part of the package: run from a checkout, `python -m benchmarks`.
"""
