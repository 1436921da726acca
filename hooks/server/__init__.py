"""`python -m ballonet serve`: an OpenAI-compatible server of several models on one pool.

The face: `Server` (server.py), `Application` and `Address` (application.py), `Engine` (engine.py), `Loop` (tenants.py),
`loaded` and `suitable` (loading.py); of recorded requests `read`, `RecordedArrival`, `replay` and `summary` (load.py).
"""
