"""Hooks, leases, turns and the gate around every forward of a managed model, whether its layers stream or not."""
