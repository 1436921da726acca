"""Decisions: numbers in, frozen answers out. No device call, no clock, no torch."""
