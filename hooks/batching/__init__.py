"""Many requests at once on the pool: transformers' continuous batching with an elastic cache.

The face: `attach`, `batched` and `others_run` (patches.py); `Batched` and `LoopCaches` (batched.py); for loops that are
not transformers' `ElasticPagedCache`, `RequestMemory`, `ElasticScheduler` and `PagePreemption` (cache.py, memory.py,
scheduler.py, steps.py); for blocks of other engines `SectorPages` (pages.py).
"""
