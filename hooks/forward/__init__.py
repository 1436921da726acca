"""Hooks, leases, turns and the gate around every forward of a managed model, whether its layers stream or not.

The face: `Forwards` and `explain` (forwards.py), `Gate` (gate.py), `Hook`, `remove_all` and `local_layers_of`
(hook_base.py), `ForwardLease`, `GroupLease`, `current` and `Turns` (lease.py).
"""
