"""What the hooks of a device's models share: its streams and marks, captured graphs, governors, and pressure."""
