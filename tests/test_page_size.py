"""The page size for models of a server: rounding costs little, and no page is smaller than that needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.layout import ENDS, fitting
from ballonet.offload.policy.layout import ROUNDING as LIMIT

KIB, MIB = 2**10, 2**20


@given(st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 2**34))
def test_it_is_the_largest_that_loses_little(ranges: list[int], caches: int, left: int) -> None:
    budget = sum(ranges) + left
    choice = fitting(ranges, caches, budget, 8 * MIB, 64 * KIB)
    sizes = [8 * MIB >> n for n in range(8)]
    lost = {page: sum(-(-range_ // page) * page - range_ for range_ in ranges) + caches * ENDS * page for page in sizes}
    assert choice.lost == lost[choice.page]
    good = [page for page in sizes if lost[page] <= LIMIT * left]
    assert choice.page == max(good, default=64 * KIB)


def test_the_model_of_the_benchmark() -> None:
    """Twelve layers of 12.5 MiB in 288 MiB: 2 MiB lose a tenth of what is left, 256 KiB little."""
    layers = [12 * MIB + 520 * KIB] * 12 + [8 * MIB]
    assert fitting(layers, 1, 288 * MIB, 2 * MIB, 64 * KIB).page <= 512 * KIB
    assert fitting(layers, 1, 2**34, 2 * MIB, 64 * KIB).page == 2 * MIB
    assert fitting(layers, 1, 100 * MIB, 2 * MIB, 64 * KIB).share == 1.0, "the weights leave nothing"
