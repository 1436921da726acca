"""The governor of a device: what it knows of models, caches and pages, and the levers that it pulls."""
