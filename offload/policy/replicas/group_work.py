"""The input of the drop gate: the work of the present groups, and of the group into which they would merge."""

from __future__ import annotations

from collections.abc import Sequence

from .cluster import Cluster
from .demand import KVSize
from .drop_gate import Work
from .groups import Group
from .request_book import RequestBook, RequestEntry

Tokens = list[tuple[int, int]]


def split(requests: Sequence[RequestEntry], used: int, pending: int, kv: KVSize) -> tuple[Tokens, Tokens]:
    """Splits a group's requests, in order, into (queued, running) of drop_gate.Work. `used`: pages of KV; `pending`:
    pages of prompts that wait.

    The controller knows pages, not which requests wait. So the newest are assumed to wait, until their prompts make up
    what is pending, and the others to have generated the same part of their answers, so that their KV is what is used.
    """
    first = len(requests)
    while first and pending > 0:
        first -= 1
        pending -= kv.pages(requests[first].prompt + 1)
    running = requests[:first]
    prompts, new = sum(request.prompt for request in running), sum(max(1, request.new) for request in running)
    part = min(1.0, max(0.0, (used * kv.page / kv.token - prompts) / new)) if new else 0.0
    done = [round(part * max(1, request.new)) for request in running]
    return (
        [(request.prompt, request.new) for request in requests[first:]],
        [(request.prompt + some, max(1, request.new - some)) for request, some in zip(running, done, strict=True)],
    )


def work_of(group: Group, cluster: Cluster, book: RequestBook) -> Work:
    """Returns the work of a group in force."""
    loads = [load for member in group.members if (load := cluster.replicas[member].load) is not None]
    used, pending = sum(load.used for load in loads), sum(load.pending for load in loads)
    queued, running = split(book.of(group.members), used, pending, cluster.kv)
    return Work(cluster.tokens(group), group.size, queued, running)


def merged_work(group: Group, parts: Sequence[Work], cluster: Cluster, page_seconds: float) -> Work:
    """Returns the work of the group into which groups with the work `parts` merge. Each of its k members first sends
    (k - 1)/k of its KV, at `page_seconds` a page."""
    used = max((load.used for member in group.members if (load := cluster.replicas[member].load)), default=0)
    return Work(
        cluster.tokens(group),
        group.size,
        [request for work in parts for request in work.queued],
        [request for work in parts for request in work.running],
        used * (group.size - 1) / group.size * page_seconds,
    )


def busiest(groups: Sequence[Group], cluster: Cluster) -> Group:
    """Returns the group whose members have most pages pending, which a drop helps most. ValueError: no groups."""
    return max(groups, key=lambda group: (pending(group, cluster), -group.members[0]))


def pending(group: Group, cluster: Cluster) -> int:
    """Returns the pages of the prompts that wait in the present groups of these members."""
    return sum(load.pending for member in group.members if (load := cluster.replicas[member].load))
