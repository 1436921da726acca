"""Replicas that drop parameters for KV (KunServe, paper 003): what is decided, without torch, I/O or a clock."""
