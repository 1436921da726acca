"""Rung 7 in a live replica: pages that the ladder lacks are reported as demand, for a while."""

from __future__ import annotations

import gc

import pytest

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.device import governors
from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.hooks.replicas.layer_moves import ReplicaSetup
from ballonet.hooks.replicas.link import Link
from ballonet.hooks.replicas.messages import End
from ballonet.hooks.replicas.replica import Replica
from ballonet.hooks.replicas.replica_model import GroupSettings, ReplicaModel
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.replicas import actions, events
from ballonet.offload.policy.tuning import DEFAULT

from ..models import build
from .desk import Desk
from .grouped import BLOCK, CHUNK, install

pytestmark = pytest.mark.usefixtures("nothing_is_left")
LAYERS = 4


def pending(replica: Replica, supervisor: Desk, now: list[float]) -> int:
    """Returns the pending pages of the next load."""
    now[0] += DEFAULT.replicas.beat
    replica.step()
    return [each.pending for each in supervisor.heard if isinstance(each, events.Load)][-1]


def test_what_the_ladder_lacks_is_pending_for_a_while() -> None:
    install()
    model, supervisor, now = build("llama", num_hidden_layers=LAYERS), Desk(), [0.0]

    def no_link(epoch: int, peer: int) -> Link:
        raise AssertionError("it is alone")

    with ballonet.manage(model) as handle, Splice(model) as splice:
        splice.prove()
        member = ReplicaModel("one", model, splice, GroupSettings.of(model, CHUNK, page_size=BLOCK))
        duplicates = governors.of(devices.require()).duplicates
        setup = ReplicaSetup(0, member, LAYERS, HeldLayers(handle), supervisor, no_link, lambda: now[0])
        replica = Replica(setup, Wakeup())
        assert duplicates.known

        supervisor.said.append(actions.Alone(1, 0))
        replica.step()
        assert pending(replica, supervisor, now) == 0
        duplicates.request_drop(7)
        assert pending(replica, supervisor, now) == 7
        duplicates.request_drop(2)
        assert pending(replica, supervisor, now) == 9, "both at once"
        now[0] += DEFAULT.replicas.wished
        assert pending(replica, supervisor, now) == 0
        supervisor.said.append(End())
        replica.run()
        assert not duplicates.known, "nobody is told any more"
        del replica, setup, member
        gc.collect()
