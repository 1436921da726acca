"""The supervisor's store, made or found as a placement says."""

from __future__ import annotations

from typing import Final

from .pair import local_address
from .placement import Placement
from .store import Store

_KEY: Final = "ballonet/supervisor"  # in torchrun's store


def open_store(placement: Placement, timeout: float) -> Store:
    """Hosts the store where this process has to, else reaches it. `timeout`: seconds that it is waited for, and that a
    call waits later. PortInUse; SupervisorLost: nobody answers; NoAnswer: nobody said in torchrun's store where."""
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
