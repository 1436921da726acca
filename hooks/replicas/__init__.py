"""Replicas of one model: links between them, groups that run as a pipeline, and the supervisor (KunServe)."""
