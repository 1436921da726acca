"""What a run of a model will take, from its configuration alone: `python -m ballonet plan`, `ballonet.plan()`."""
