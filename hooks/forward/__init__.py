"""Around every forward of a managed model, whether its layers stream or not: hooks, leases, turns, and the gate."""
