"""The elastic KV cache: cache layers over ranges of the pool, where their pages come from, how generate() gets them.

The face: `KVCache`, `plan` and `make_elastic` (cache.py), `attach` and `follow` (generation.py), `ElasticLayer`
(layer.py), `CacheRanges`, `KVRange` and `geometry_for` (ranges.py), `find_pages` (pages.py).
"""
