"""`python -m ballonet serve`: transformers' own OpenAI-compatible server, with several models on one pool."""
