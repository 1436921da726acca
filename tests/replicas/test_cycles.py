"""Two, three and four replicas that drop layers and restore them, again and again, while pages move at random."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from .fleet import NEEDS_ALL, Fleet, Stock, drawn, made, serving

CYCLES = 20
WEIGHTS = 487  # pages of the model
REQUESTS = 12  # of each replica: two levels of drops


class Widest:
    """Looks for the group of most replicas, in a thread of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.found = 1
        self._fleet = fleet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Widest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.found = max(self.found, *map(len, self._fleet.supervisor.state().groups))


@NEEDS_ALL
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tokens_stay_and_memory_comes_back(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = made(tmp_path)
    asked = drawn(REQUESTS * ranks)
    right = Stock(model).answers(asked)
    with serving(model, tmp_path, ranks, BALLONET_CHAOS="7") as fleet, Widest(fleet) as widest:
        cycles = 0
        while cycles < CYCLES:
            drops = fleet.supervisor.state().restores
            found = fleet.burst(asked)
            assert [each.text for each in found] == right, fleet.said
            assert [each.ends for each in found] == [1] * len(asked)
            fleet.whole(ranks)
            cycles += fleet.supervisor.state().restores > drops
            rest = fleet.at_rest()
            # twins of layers are kept ready, and a page that stands for those in files; nothing else is on the host
            assert max(each["host_pages"] - each["host_free"] for each in rest) <= WEIGHTS + 1
            with capsys.disabled():
                print(f"cycle {cycles}: groups of up to {widest.found}", flush=True)
        state = fleet.supervisor.state()
        assert (state.replaced, state.fenced) == (0, 0), fleet.said
        assert widest.found == ranks
