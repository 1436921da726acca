"""Who waits for whom where a stored prefix is used: who copies it for who wrote it, who goes on with it for who copied,
other threads for who copies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from ballonet.hooks.forward.lease import ForwardLease
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.hooks.prefix.sequence import CachedSequence, TokenRun, copy_in, reading

from .hold import held
from .scene import Place, scene


class Stored:
    """A sequence of one layer that fills some pages, and new tokens."""

    def __init__(self, place: Place) -> None:
        heads, dim = (8, 128) if place.cuda else (2, 16)
        self.tokens = 2 * place.page // (2 * heads * dim * 4)
        self.new = torch.randn(1, heads, self.tokens, dim, device=place.kind)
        self.layer = ElasticLayer(CacheRanges(expected=3 * self.tokens))
        self.sequence = CachedSequence([self.layer], range(2 * self.tokens), b"")
        self.append()
        place.synchronize()

    def append(self) -> None:
        """As a forward does."""
        lease = ForwardLease().open()
        self.layer.update(self.new, -self.new)
        lease.close()

    def copied(self) -> ElasticLayer:
        """To another cache; submitted."""
        copy = ElasticLayer(CacheRanges())
        end = self.layer.get_seq_length()
        copy_in([copy], [[TokenRun(self.sequence, 0, end)]], [0])
        return copy

    def check(self, copy: ElasticLayer, times: int) -> None:
        assert torch.equal(copy.keys, torch.cat([self.new] * times, dim=2))
        assert torch.equal(copy.values, torch.cat([-self.new] * times, dim=2))


@scene(pages=256)
def test_copy_waits_for_the_writer(place: Place) -> None:
    stored, reader = Stored(place), place.lane()
    stored.copied()  # what is done once is done
    place.synchronize()
    with held(place) as hold:
        with hold.lane():
            stored.append()
            stored.sequence.was_written()
        with reader():
            copy = stored.copied()
        hold.keeps(reader.done)
    reader.lead()
    stored.check(copy, 2)


@scene(pages=256)
def test_next_turn_waits_for_the_copy(place: Place) -> None:
    stored, writer = Stored(place), place.lane()
    with held(place) as hold:
        with hold.lane():
            copy = stored.copied()
        with writer():
            stored.sequence.after_reads()
            stored.layer.cut(0, stored.tokens)
            stored.new.neg_()
            stored.append()
        hold.keeps(writer.done)
    writer.lead()
    hold.lane.lead()
    stored.new.neg_()
    stored.check(copy, 1)


@scene(pages=256)
def test_other_threads_move_nothing_that_is_copied(place: Place) -> None:
    stored = Stored(place)
    kv_range = stored.layer.kv_range
    assert kv_range is not None

    def tried() -> int:
        """Pages that another thread moves."""
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(lambda: sum(kv_range.range.move(piece, "device") for piece in range(2))).result()

    with reading([TokenRun(stored.sequence, 0, stored.tokens)]):
        keys, values = stored.sequence.part(0, 0, stored.tokens)
        assert not tried(), "the lease of who copies was not asked for"
        assert torch.equal(keys, -values)
    assert tried() == 2
    del keys, values
    stored.check(stored.copied(), 1)
