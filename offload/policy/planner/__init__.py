"""Predictions of a run: pages, seconds, what binds, and what would help. Pure.

The face: `answered` and `nearest` with `Question`, `PlanAnswer` and `PlanChange` (answer.py), `Hardware` (hardware.py),
`Needs` and `Moment` (memory.py).
"""
