"""Streams, marks, leases and captured graphs of a device, as the hooks of models use them."""
