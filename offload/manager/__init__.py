"""The memory manager of a device: what it knows of models, caches and pages, and the sources that it reclaims.

The face: `MemoryManager` and its `Surroundings` (memory_manager.py); the contract of its clients, `ModelClient`,
`PageClient` and `Offer` (client.py); its answers, `StreamDecision` and `Lendable` (decision.py) and `Streamed`
(kv_read_plan.py); `KVTier`, the client of a KV cache (kv_tier.py).
"""
