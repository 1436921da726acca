"""A process that is watched: what it publishes, Prometheus' registry, and the view in a terminal or a notebook."""
