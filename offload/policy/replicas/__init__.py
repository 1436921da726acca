"""Replicas that drop parameters for KV (KunServe): what to drop, decided without I/O."""
