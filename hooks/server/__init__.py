"""`ballonet serve`: endpoints as OpenAI has them, of several models on one pool.

The face: `Server` (server.py), `Application` and `Address` (application.py), `Doors` (doors.py), `Engine` and `Denial`
(engine.py), `Loop` (loops.py), `Models` (served.py); of recorded requests `read`, `replay` and `summary` (load.py).
"""
