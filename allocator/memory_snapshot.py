"""The pages of a device in the format of PyTorch's memory viewer (pytorch.org/memory_viz, `torch.cuda._memory_viz`).

Note [Owners in the viewer]
    The viewer shows blocks, and of each the stack that allocated it. Pages of weights and KV have no such stack. Their
    contents stand in its place, as frames: first the name, `model.layers.3.mlp.up_proj.weight`, then the owner,
    `weights`. Those frames come after the ones that torch recorded, where it did, so that a flame graph, which begins
    with the outermost, is grouped by owner. A run of pages is cut where its contents begin; the viewer counts the rest
    of a page behind the last as lost to rounding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from ._native import Segment

STATES: Final = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
Frame = dict[str, Any]


class SnapshotContents(NamedTuple):
    """Bytes that have a name: `name` of what lies at [address, address + nbytes), and of `whom`, a model or cache."""

    address: int
    nbytes: int
    name: str
    whom: str


def viewed(
    segments: Iterable[Segment],
    contents: Iterable[SnapshotContents] = (),
    *,
    ordinal: int = 0,
    history: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the snapshot, of plain dicts and lists. `segments`: `Device.segments()`; `contents`: known tensors in
    them, in any order; `history`: torch's own snapshot, whose stacks, traces and settings are taken over."""
    known = _in_order(contents)
    starts = [content.address for content in known]
    stacks = _stacks(history)
    return {
        **(history or {"device_traces": [[] for _ in range(ordinal + 1)]}),
        "segments": [_segment(segment, known, starts, stacks, ordinal) for segment in segments],
    }


def pages_by_owner(snapshot: Mapping[str, Any], page_size: int) -> dict[str, int]:
    """Returns how many pages each owner has in a snapshot of `viewed`."""
    counts: dict[str, int] = {}
    for segment in snapshot["segments"]:
        owner = segment["ballonet_owner"]
        counts[owner] = counts.get(owner, 0) + segment["total_size"]
    return {owner: nbytes // page_size for owner, nbytes in counts.items()}


def _segment(
    segment: Segment,
    known: Sequence[SnapshotContents],
    starts: Sequence[int],
    stacks: Mapping[int, list[Frame]],
    ordinal: int,
) -> dict[str, Any]:
    address, nbytes, pool, small, rows, owner, stream = segment
    blocks: list[dict[str, Any]] = []
    for at, size, requested, state in rows:
        named = owner in ("weights", "kv")
        for piece in _cut(at, size, known, starts) if named else [(at, size, requested, None)]:
            start, length, asked, content = piece
            frames = [*stacks.get(start, ()), *([_frame(content.name, content.whom)] if content else []), _frame(owner)]
            blocks.append(
                {
                    "address": start,
                    "size": length,
                    "requested_size": asked,
                    "state": STATES[state],
                    "frames": frames,
                }
            )

    def total(field: str, *states: str) -> int:
        return sum([int(block[field]) for block in blocks if block["state"] in states])

    active = STATES["allocated"], STATES["pending"]
    return {
        "device": ordinal,
        "address": address,
        "total_size": nbytes,
        "allocated_size": total("size", active[0]),
        "active_size": total("size", *active),
        "requested_size": total("requested_size", *active),
        "stream": stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": pool,
        "is_expandable": True,
        "frames": [_frame(owner)],
        "blocks": blocks,
        "ballonet_owner": owner,
    }


def _cut(
    address: int, nbytes: int, known: Sequence[SnapshotContents], starts: Sequence[int]
) -> Iterator[tuple[int, int, int, SnapshotContents | None]]:
    """Yields (address, bytes, bytes of these that are used, contents) of the pieces that a run of pages is cut into."""
    end = address + nbytes
    index = bisect_left(starts, address)
    if index and known[index - 1].address + known[index - 1].nbytes > address:
        index -= 1  # begins before the run
    inside = []
    while index < len(known) and known[index].address < end:
        inside.append(known[index])
        index += 1
    begins = [max(address, tensor.address) for tensor in inside]
    if not begins or begins[0] > address:
        first = begins[0] if begins else end
        yield address, first - address, first - address, None
    for content, begin, after in zip(inside, begins, [*begins[1:], end], strict=False):
        yield begin, after - begin, min(content.address + content.nbytes, after) - begin, content


def _in_order(contents: Iterable[SnapshotContents]) -> list[SnapshotContents]:
    """Returns contents by address, each byte once: one that begins within another is left out."""
    result: list[SnapshotContents] = []
    for content in sorted(contents, key=lambda content: (content.address, -content.nbytes)):
        if content.nbytes and (not result or content.address >= result[-1].address + result[-1].nbytes):
            result.append(content)
    return result


def _stacks(history: Mapping[str, Any] | None) -> dict[int, list[Frame]]:
    """Returns the frames that torch recorded, by the address of the block."""
    if history is None:
        return {}
    return {
        block["address"]: block["frames"]
        for segment in history["segments"]
        for block in segment["blocks"]
        if block.get("frames")
    }


def _frame(name: str, whom: str = "ballonet") -> Frame:
    return {"filename": whom, "line": 0, "name": name}
