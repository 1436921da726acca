"""Plans the memory and times of a run from configurations alone: `python -m ballonet plan`, `ballonet.plan()`."""
