"""The formulas of Oneiros by which its controller decides: an oracle for prices (§5.3)."""

from __future__ import annotations

from itertools import takewhile

from ballonet.offload.policy.plan import Costs, spread


def cap(costs: Costs) -> int:
    """The most layers whose copies take no longer than the iteration and what the host takes for them, T_T·N ≤
    T_compute; never all that have pages. It counts the layers that stream (m), and not those whose pages are free
    (m - β)."""
    pages, total = costs.pages, sum(costs.pages)
    entering = costs.host * total / max(1, len(pages))  # in pages computed

    def hidden(count: int) -> bool:
        at = spread(pages, count)
        return sum(pages[layer] for layer in at) * costs.ratio <= total + len(at) * entering

    return max(takewhile(hidden, range(max(1, sum(map(bool, pages))))))
