"""Replicas of a model that drop layers for KV (KunServe)."""
