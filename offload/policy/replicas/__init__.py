"""Decisions of replicas: when groups drop parameters, what a pipeline takes, and how its microbatches are formed."""
