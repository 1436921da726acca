"""When pages that are away come back: once their absence has cost what a change costs (ski rental). Pure.

Note [Ski rental]
    Whoever has to wait for pages does not know for how long it will. So it waits until it has waited for as long as the
    change takes, there and back, and then has them back. That costs at most twice of what was best in hindsight, and
    one change: either the waiting ended before, and was cheaper, or the change pays for what was waited. No timer
    decides, and what moves takes no longer than what was waited before.

    Where others' pages have to go in their place, as much can be waited for there soon: each takes the place of the
    other. With the change as the threshold uses in turns cost four times the best fixed choice, with twice the change
    three times (one of two waits for twice the change and then makes it: 3; the best choice waits for every other
    one: 2 in two rounds).

Note [Free pages]
    What hides is waited for by nobody, and would never come back. But the link is used for it, and pages that are free
    serve nobody: where there are enough for all that is away, it comes back once the link was used for as long. Where
    there are not, some would still be copied, and pages would go again to whatever grows.
"""

from __future__ import annotations


def change(comes: int, goes: int, page_seconds: float) -> float:
    """Seconds that a change takes there and back: so many pages come, and others go in the place of `goes` of them."""
    return 2 * (comes + goes) * page_seconds


def threshold(comes: int, goes: int, page_seconds: float) -> float:
    """Seconds of waiting after which pages come back, so many, and others go in the place of `goes` of them. See Note
    [Ski rental]."""
    return change(comes, goes, page_seconds) * (2 if goes else 1)


def kv_returns(waited: float, copied: float, away: int, spare: int, idle: int, page_seconds: float) -> int:
    """Pages of KV that come back. Of each page that is `away`: seconds that iterations have `waited` for it, and that
    the link has `copied` it; `spare`: free pages, beside those that `idle` clients have. See Note [Free pages]."""
    freed, exchanged = min(away, spare), min(away, spare + idle)
    if exchanged and waited * exchanged >= threshold(exchanged, exchanged - freed, page_seconds):
        return exchanged
    if freed and waited * freed >= threshold(freed, 0, page_seconds):
        return freed
    return away if away <= spare and copied * away >= threshold(away, 0, page_seconds) else 0
