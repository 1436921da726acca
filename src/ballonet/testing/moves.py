"""What `ballonet.testing` attaches to a managed model: chaos at the boundaries of its decoder layers.

Note [Chaos and backward]
    A forward has ended, and so has its lease, when backward reads weights that its graph holds, perhaps on a thread of
    autograd's own. So once a thread has run the model with gradients, chaos on other threads moves weights only while
    no graph holds any. It checks that and moves them under a lock, which each forward takes at its layers as well: no
    thread gets from its forward to a backward meanwhile.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from ..hooks.device import managers
from ..hooks.forward.lease import current
from ..hooks.managed import weights_of
from ..hooks.weights.model_parts import in_graphs
from .chaos import Chaos
from .movable import movable
from .sources import sources

if TYPE_CHECKING:
    from ..hooks.managed import Managed


class PageMoves:
    """Moves pages of one model before its decoder layers, as `chaos` draws them."""

    def __init__(self, managed: Managed, seed: int) -> None:
        self._weights = weights_of(managed)
        device = self._weights.device
        manager = managers.of(device)
        self.chaos = Chaos(seed, device.host_pages, device.peer is not None, manager.tuning.chaos.seldom)
        self._model: weakref.ref[torch.nn.Module] = managed._model
        self._sources = sources(manager, device, spill=manager.spill)
        self._moving = threading.Lock()  # weights; see Note [Chaos and backward]
        self._learning: set[int] = set()  # threads that have run the model with gradients

    def __call__(self) -> None:
        lease = current()
        if lease is None:
            return
        with self._moving:
            if torch.is_grad_enabled():
                self._learning.add(threading.get_ident())
            others, model = self._learning - {threading.get_ident()}, self._model()
            held = bool(others) and model is not None and in_graphs(model)
            weights = () if held else self._weights.all_ranges()
            self.chaos.act(weights, [movable(pages) for pages in lease.written])
        self.chaos.reclaim(self._sources)
