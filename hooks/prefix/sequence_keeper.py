"""Keeps, gives back or drops the sequence of a request that ends."""

from __future__ import annotations

from collections.abc import Sequence

from ...offload.governor.client import ModelClient
from .contents import Contents, Lookup
from .identity import Identity
from .limit import Limit
from .sequence import CachedSequence
from .snapshot import StateSnapshot


class SequenceKeeper:
    """Takes over the sequences of requests that end."""

    def __init__(self, contents: Contents, limit: Limit, governed: ModelClient) -> None:
        """`governed`: the model as a client of the governor."""
        self._contents = contents
        self._limit = limit
        self._governed = governed

    def keep(self, sequence: CachedSequence | None, now: Identity, states: Sequence[StateSnapshot] = ()) -> None:
        """Keeps a sequence, whose layers are not in any cache, and the states of its layers at some lengths; None for a
        model of states alone. Keeps no more than other models can spare (repayment.py). DriverError."""
        contents = self._contents
        if sequence is not None:
            sequence.was_written()
        for state in states:
            state.into_pages(contents.device, contents.governor)
        with contents.change() as index:
            if not contents.closed and now.weights == contents.weights:
                if sequence is not None:
                    index.put(sequence)
                for state in states:
                    index.put_state(state)
                contents.counts.stored += 1
                index.pins.record([*(sequence.keys if sequence else ()), *(state.key for state in states)])
                contents.log_decision("store", index.idle.get(sequence, 0) if sequence else 0)
                if contents.saver is not None and sequence is not None and not sequence.needs_state:
                    full = len(sequence.ids) // index.blocks.block
                    contents.saver.stored(sequence.ids, sequence.keys[:full], now)
                self._limit.enforce()
            elif sequence is not None:
                index.forget(sequence)
        clients = [state.pages.number for state in states if state.pages is not None]
        contents.governor.repayment.keep(self._governed, [*clients, *(sequence.caches if sequence else ())])

    def is_new(self, ids: Sequence[int], now: Identity) -> bool:
        """Would keeping these tokens store anything new?"""
        contents = self._contents
        with contents.lock:
            keys = contents.index.blocks.keys(ids, now.settings)
            return contents.index.blocks.index.peek(keys) < len(keys)

    def give_back(self, sequence: CachedSequence, now: Identity) -> None:
        """Keeps the sequence of a request that raised, as it was before. DriverError."""
        if sequence.layers and all(
            layer.kv_range is not None and layer.get_seq_length() >= len(sequence.ids) for layer in sequence.used
        ):
            sequence.trim()
            self.keep(sequence, now)
        else:
            self.drop(sequence)

    def drop(self, sequence: CachedSequence) -> None:
        """Invalidates the sequence and all that relies on it. DriverError."""
        with self._contents.change() as index:
            index.forget(sequence)

    def lose(self, lookup: Lookup) -> None:
        """Drops, at the next change, the sequence of a request that was collected. For finalizers, which may run
        between any two lines."""
        if lookup.sequence is not None:
            self._contents.index.lost.append(lookup.sequence)
