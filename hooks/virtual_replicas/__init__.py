"""Replicas of one model under a virtual clock, by what they do when memory is full."""
