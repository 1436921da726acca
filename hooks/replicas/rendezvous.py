"""Opens the supervisor's store: hosts it, or connects to it, according to the placement."""

from __future__ import annotations

from typing import Final

from .pair import local_address
from .placement import Placement
from .store import Store

_KEY: Final = "ballonet/supervisor"  # in torchrun's store


def open_store(placement: Placement, timeout: float) -> Store:
    """Hosts the store if this process is the supervisor, else connects to it. `timeout`: seconds to wait for it, and of
    its calls later. SupervisorPortInUse; SupervisorLost: no answer; NoAnswer: torchrun's store has no address of it."""
    if not placement.agent:
        if placement.hosts:
            return Store.host(placement.host, placement.port, timeout=timeout)
        return Store.connect(placement.host, placement.port, timeout=timeout)
    agent = Store.connect(placement.host, placement.port, timeout=timeout)
    if placement.hosts:
        address = local_address(placement.host, placement.port)
        store = Store.host(address, timeout=timeout)
        agent.set(_KEY, f"{store.port} {address}")
        return store
    port, _, address = agent.get(_KEY).partition(" ")
    return Store.connect(address, int(port), timeout=timeout)
