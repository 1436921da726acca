"""What a run will take, worked out before it: pages, seconds, what binds, and what would help. Pure."""
