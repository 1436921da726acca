"""What is free after 30 % of the live blocks were dropped at random, and how much of it another class can use.

The pool is full of blocks of one class, each of its own size. So many of them are dropped, and pages of another class
are mapped until there are none left. "Free" is the budget less what lives: the bytes of tensors as they were asked for,
the pages of caches. Tensors share pages at their ends with their neighbours, so a hole between two of them loses a
page, whatever its size: 99 % are what holes of a hundred pages leave. On a GPU the same tensors are dropped from
torch's own allocator, and blocks of pages are allocated there instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from common import GIB, MIB, Figure, Options, report
from peer import Functions, answering, begin, peers

from ballonet.allocator.units import format_size

BUDGET = {"cuda": 48 * GIB, "cpu": GIB, "tiny": 64 * MIB}  # bytes
PAGE = {"cpu": 2**16, "tiny": 2**12}  # bytes; a GPU has its default
CASES = {  # what lives: its class, and the pages of a block
    "caches": ("kv", 1, 256),
    "large tensors": ("activations", 48, 256),
    "small tensors": ("activations", 1, 8),
}
DROPPED, USABLE = 0.3, 0.99


def main() -> None:
    chosen = begin("fragmentation", __doc__, functions)
    names = ("ballonet", "torch") if chosen.cuda else ("ballonet",)
    rows = []
    with peers(__file__, chosen, names) as started:
        found = answering(started, ("ballonet",), "page")
        page = found["ballonet"].ask("page")
        for number, (what, (owner, least, most)) in enumerate(CASES.items()):
            size = {"owner": owner, "least": least * page, "most": most * page, "page": page, "seed": number}
            ours = found["ballonet"].ask("drop", **size)
            theirs = found["torch"].ask("drop", **size) if "torch" in found and owner == "activations" else None
            usable = Figure.of([ours["usable"] / ours["free"]])
            rows.append(
                {
                    "what lives": what,
                    "pages of each": f"{least} to {most}",
                    "blocks": ours["blocks"],
                    "dropped": ours["dropped"],
                    "free, MiB": round(ours["free"] / MIB),
                    "usable, MiB": round(ours["usable"] / MIB),
                    "usable / free": usable.at_least(USABLE) if what != "small tensors" else usable,
                    "torch's own": "" if theirs is None else Figure.of([theirs["usable"] / theirs["free"]]),
                }
            )
    title = f"30 % of what lives is dropped at random, pages of {format_size(page)}"
    report(chosen, "fragmentation", title, rows)


def functions(name: str, chosen: Options) -> Functions:
    import torch

    import ballonet
    from ballonet.allocator import devices

    kind = chosen.kind
    if name == "ballonet":
        page = None if chosen.cuda else PAGE[kind]
        ballonet.install(BUDGET[kind], page_size=page, spill=False)
        device = devices.require()
        return {"page": lambda: device.page_size, "drop": lambda **size: dropped(of_the_pool(chosen.device), **size)}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(BUDGET[kind] / total)
    return {"page": lambda: 0, "drop": lambda **size: dropped(of_torch(BUDGET[kind]), **size)}


def dropped(
    pool: tuple[int, Callable[[str, int], object], Callable[[str, int], int]],
    owner: str,
    least: int,
    most: int,
    page: int,
    seed: int,
) -> dict[str, int]:
    """Fills the pool with blocks of `least` to `most` bytes and drops some. Blocks; bytes that are free and usable."""
    budget, make, usable = pool
    drawn = random.Random(seed)
    blocks: list[tuple[int, Any]] = []
    refused = 0
    while refused < 20:  # the last ones that fit are small
        nbytes = round(least * (most / least) ** drawn.random())
        if owner == "kv":
            nbytes = -(-nbytes // page) * page
        try:
            blocks.append((nbytes, make(owner, nbytes)))
        except (MemoryError, RuntimeError):  # of torch, and of the pool
            refused += 1
    drawn.shuffle(blocks)
    count = round(DROPPED * len(blocks))
    del blocks[:count]
    free = budget - sum(nbytes for nbytes, _ in blocks)
    other = "activations" if owner == "kv" else "kv"
    return {"blocks": len(blocks) + count, "dropped": count, "free": free, "usable": usable(other, page)}


def of_the_pool(place: str) -> tuple[int, Callable[[str, int], object], Callable[[str, int], int]]:
    """The budget; what makes a block of a class; how many bytes of a class there is room for."""
    import torch

    from ballonet.allocator import devices
    from ballonet.allocator.errors import PoolExhausted

    device = devices.require()

    def make(owner: str, nbytes: int) -> object:
        if owner == "activations":
            return torch.empty(nbytes, dtype=torch.uint8, device=place)
        cache = device.reserve(nbytes, "kv", device.group())
        cache.map(0, cache.pieces)
        return cache

    def usable(owner: str, page: int) -> int:
        if owner == "activations":
            return filled(lambda count: torch.empty(count * page, dtype=torch.uint8, device=place), page, device.budget)
        room = device.reserve(device.budget, "kv", device.group())
        at, count = 0, room.pieces
        while count:
            try:
                room.map(at, min(count, room.pieces - at))
                at += min(count, room.pieces - at)
            except PoolExhausted:
                count //= 2
        room.close()
        return at * page

    return device.budget, make, usable


def of_torch(budget: int) -> tuple[int, Callable[[str, int], object], Callable[[str, int], int]]:
    """The same of torch's own allocator."""
    import torch

    def make(owner: str, nbytes: int) -> object:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def usable(owner: str, page: int) -> int:
        torch.cuda.empty_cache()
        return filled(lambda count: make(owner, count * page), page, budget)

    torch.cuda.empty_cache()
    return budget, make, usable


def filled(make: Callable[[int], object], page: int, budget: int) -> int:
    """Bytes for which there was room, in blocks of as many pages as there are, then of fewer."""
    import torch

    blocks, pages, count = [], 0, budget // page
    while count:
        try:
            blocks.append(make(count))
            pages += count
        except torch.OutOfMemoryError:
            count //= 2
    return pages * page


if __name__ == "__main__":
    main()
