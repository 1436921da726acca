"""How the tokens of requests are chosen: a request's settings, and one sampler for batches and replicas.

The face: `Sampling` and `ChosenToken` (settings.py), `draw`, `SampledRow` and `TokenCounts` (sampler.py),
`SampledRequest` (carried.py), `LoopSampler` (loop.py), `grammar_of` and `Grammars` (grammar.py).
"""
