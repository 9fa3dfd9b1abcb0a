"""Searches deployments: equations first, then the simulator. What it prints and writes: docs/plan.md."""
