"""Performs the controller's actions: sends them to replicas and clients, ends processes, prints and counts them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ...offload.policy.replicas import actions
from ...offload.policy.replicas.cluster import Cluster
from ...offload.policy.replicas.events import Reason
from .channel import ReplicaSink
from .client_requests import ClientRequests
from .messages import End, Message
from .ranks import Ranks
from .recording import Recording


class ActionPerformer:
    """Performs actions. Used by one thread. `counts`: of actions, by name; `declined`: declined drops, by reason."""

    def __init__(
        self,
        replicas: ReplicaSink,
        clients: ClientRequests,
        ranks: Ranks,
        ready: threading.Event,
        say: Callable[[str], object],
        recording: Recording | None,
    ) -> None:
        """`ready`: is set once a replica serves; `say`: prints a line."""
        self.counts: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self._replicas = replicas
        self._clients = clients
        self._ranks = ranks
        self._ready = ready
        self._say = say
        self._recording = recording
        self._drops: dict[int, bool] = {}  # by epoch in preparation: does it drop layers?
        self._prepared: set[int] = set()  # members of the epoch in preparation

    def perform(self, action: actions.Action, cluster: Cluster) -> None:
        """Performs an action. `cluster`: the controller's, after this event."""
        match action:
            case actions.Dispatch():
                self._give((action.request,), action.epoch, action.members)
            case actions.Recompute():
                self.counts["recompute"] += len(action.requests)
                self._give(action.requests, action.epoch, action.members)
            case actions.Refuse():
                self._clients.refuse(action.request, f"no replicas can compute it: {action.reason.value}")
            case actions.Cancel():
                self._replicas.post(action.members[0], action)
            case actions.Prepare():
                self._drops[action.epoch] = any(group.is_dropped for group in action.groups)
                self._prepared = {member for group in action.groups for member in group.members}
                self._to(self._prepared, action)
            case actions.Commit():
                self._committed(action, cluster)
            case actions.Discard():
                self.counts["discard"] += 1
                self._drops.pop(action.epoch, None)
                self._mark(f"epoch {action.epoch} is given up")
                self._say(f"epoch {action.epoch} is given up: {action.reason.value}")
                self._to(self._prepared, action)
            case actions.Alone():
                self._replicas.post(action.member, action)
                self._ready.set()
            case actions.StartRestore():
                comes = Counter(each.member for each in action.pulls)
                parts = ", ".join(f"{count} to replica {member}" for member, count in sorted(comes.items()))
                self._say(f"epoch {action.epoch}: layers come home: {parts}")
                self._to({each.member for each in action.pulls}, action)
            case actions.Fence():
                self.counts["fence"] += 1
                self._fence(action)
            case actions.Decline():
                self.declined[action.reason.value] += 1
            case actions.Rejoin():
                self._replicas.post(action.member, action)
            case actions.Hold():
                pass  # the request waits in the controller

    def _fence(self, action: actions.Fence) -> None:
        """Kills a process of this machine. A replica of another machine may only be paused: if it resumes, it joins
        anew."""
        ended = self._ranks.end(action.member)
        ends = ended or action.reason is Reason.FILE_CHANGED
        what = f"replica {action.member} is {'ended' if ends else 'shut out until it joins anew'}"
        self._mark(what)
        self._say(f"{what}: {action.reason.value}")
        self._replicas.post(action.member, End() if ends else actions.Rejoin(action.member))

    def _committed(self, action: actions.Commit, cluster: Cluster) -> None:
        drops = self._drops.pop(action.epoch, True)
        self.counts["drop" if drops else "restore"] += 1
        self._mark(f"epoch {action.epoch}: {'drop' if drops else 'restore'}")
        groups = [each.group for each in cluster.groups.values() if each.epoch == action.epoch]
        for group in groups:
            parts = ", ".join(
                f"replica {member} holds layers {span.begin} to {span.end - 1}"
                for member, span in zip(group.members, group.spans, strict=True)
            )
            self._say(f"epoch {action.epoch}: {parts}")
        self._to(self._prepared, action)

    def _mark(self, what: str) -> None:
        if self._recording is not None:
            self._recording.mark(what)

    def _give(self, names: tuple[str, ...], epoch: int, members: tuple[int, ...]) -> None:
        for start in self._clients.assign(names, epoch):
            self._replicas.post(members[0], start)

    def _to(self, members: set[int], message: Message) -> None:
        for member in sorted(members):
            self._replicas.post(member, message)
