"""What the hooks of a device's models share: its streams and marks, leases, captured graphs, the gate, and pressure."""
