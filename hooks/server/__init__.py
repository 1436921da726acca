"""`python -m ballonet serve`: transformers' own OpenAI-compatible server, with several models on one pool.

The face: `Server` (server.py), `Application` and `Address` (application.py), `Engine` (engine.py), `Tenants`
(tenants.py), `loaded` and `suitable` (loading.py); of recorded requests `read`, `RecordedArrival`, `replay` and `summary`
(load.py).
"""
