"""The elastic KV cache: cache layers over ranges of the pool, where their pages come from, how generate() gets them."""
