"""Many requests at once on the pool: transformers' continuous batching with an elastic cache."""
