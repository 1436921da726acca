"""A process that is watched: what it publishes, Prometheus' registry, and the view in a terminal or a notebook.

The face: `model_facts` (facts.py), `serve` and `listen` (endpoint.py), `Addition` and `text` (registry.py),
`WatchedProcesses` (processes.py), `watch`, `process`, `as_text` and `lines_of` (view.py), `Top` (terminal.py).
"""
