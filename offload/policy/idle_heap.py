"""When the heap of a model whose layers stream gives back pages that steps do not use any more.

Note [Pages of a burst]
    Free pages of the heap stay with it, so that steps need no page call, and it keeps what the largest step took.
    Layers that were lent come back for free pages alone. So every so many steps what lies idle is compared with what
    the largest of them needed. Where it is more than twice that, all of it goes, and the next step maps what it takes,
    once. What steps need is an estimate: what the heap has grown to by the next comparison counts instead where it is
    more, as long as steps need at least half of what they needed then. So a load that stays costs no second trim.
"""

from __future__ import annotations


class IdleHeap:
    """Decides for one loop, every `steps` steps, whether its heap gives back idle pages. Sizes in bytes."""

    def __init__(self, steps: int) -> None:
        self._steps = self._left = steps
        self._largest = 0  # bytes that one of these steps needed
        self._trimmed = False  # were all pages given back before them?
        self._grown = 0, 0  # what lay idle after such steps, and what they needed

    def passed(self, needed: int) -> bool:
        """Notes that a step needed so much. Is it time to ask `gives`?"""
        self._largest = max(self._largest, needed)
        self._left -= 1
        return self._left <= 0

    def gives(self, idle: int, streams: bool) -> bool:
        """Should the idle pages go? `streams`: do layers stream? Begins the next `steps` steps. See Note [Pages of a
        burst]."""
        if self._trimmed:
            self._grown = idle, self._largest
        grown, needed = self._grown
        self._trimmed = streams and idle > 2 * max(self._largest, grown if 2 * self._largest >= needed else 0)
        self._largest, self._left = 0, self._steps
        return self._trimmed
