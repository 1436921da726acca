"""How the tokens of requests are chosen: a request's settings, and one sampler for batches and replicas."""
