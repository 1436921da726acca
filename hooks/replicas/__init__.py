"""Replicas of one model: how they find one another, and what goes between them (KunServe)."""
