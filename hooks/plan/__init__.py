"""Plans the memory and times of a run from configurations alone: `ballonet plan`, `ballonet.plan()`.

The face: `plan`, `Planner`, `show` and `helpful_changes` (planner.py); with recorded requests `run`, `named` and
`measure_steps` (run.py), `Machine` and `Tenant` (machine.py).
"""
