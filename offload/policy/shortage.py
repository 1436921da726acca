"""When pages are short, and when a new reclaim list is worth its time. Pure."""

from __future__ import annotations

from .tuning import FreePages, KVGrowth


def scarce(free: int, total: int, tuning: FreePages) -> bool:
    """Are so many free pages of a budget few?"""
    return free * tuning.short < total


def worth_telling(pages: int, total: int, tuning: KVGrowth) -> bool:
    """Are so many pages that became full, and may be taken, worth a new list?"""
    return pages > 0 and pages * tuning.tell >= total
