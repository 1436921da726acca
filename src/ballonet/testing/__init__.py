"""For tests: pages that move at random, driver calls that fail, and links of the stand-in that are slow.

    from ballonet import testing

    for name, value in testing.environment(chaos=7, link="2GB/s", fault="cuMemMap:7").items():
        monkeypatch.setenv(name, value)  # before install(), or for a process that is started

    managed = testing.manage(model, chaos=7)
    model.generate(**inputs)  # the same tokens
    testing.chaos_of(managed).moved  # what was moved meanwhile

None of it is meant for a program that serves anybody, and so none of it is in the signatures of `ballonet`. Faults and
links belong to the driver that a process loads: they come by the environment, before `install()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..allocator.config import Config
from ..allocator.errors import AlreadyManaged, OptionError

if TYPE_CHECKING:
    from torch import nn

    from ..hooks.managed import Managed
    from .chaos import Chaos

__all__ = ["chaos_of", "environment", "manage"]


def environment(
    *,
    chaos: int | None = None,
    fault: str | None = None,
    link: str | None = None,
    link_latency: str | None = None,
    peer_link: str | None = None,
    replica_faults: str | None = None,
) -> dict[str, str]:
    """Returns variables for the environment of a process, those that are given.

    `chaos`: a seed; pages of weights and KV move at random while models run. `fault`: "cuMemMap:7", the seventh such
    call of the driver fails, once; "cuMemMap=700:7", with that CUresult; several with commas between them. `link`, and
    `peer_link` to and from the peer: bandwidth of the stand-in's copies, "2GB/s"; `link_latency`: added to each of
    them, "10us". `replica_faults`: a file, see testing/replica_faults.py. ConfigError where one is not
    understood.
    """
    given = {
        "BALLONET_CHAOS": chaos,
        "BALLONET_FAULT": fault,
        "BALLONET_LINK": link,
        "BALLONET_LINK_LATENCY": link_latency,
        "BALLONET_PEER_LINK": peer_link,
        "BALLONET_REPLICA_FAULTS": replica_faults,
    }
    variables = {name: str(value) for name, value in given.items() if value is not None}
    Config.from_env(variables)  # says what is wrong here, and not in the process
    return variables


def manage(model: nn.Module, *, chaos: int | None = None, **options: Any) -> Managed:
    """`ballonet.manage(model, **options)`, with chaos: at the boundaries of decoder layers random pages of the model's
    weights and KV are moved. `chaos`: a seed; None: as `ballonet.manage`. A model that is managed already, without,
    gets it. Raises what `ballonet.manage` raises, AlreadyManaged where it has another seed, OptionError for what is
    no seed."""
    from ..hooks.manage import manage

    if chaos is not None and (type(chaos) is not int or chaos < 0):
        raise OptionError(f"chaos is {chaos!r}: give a seed, a whole number that is not negative, or None")
    managed = manage(model, **options)
    if chaos is not None:
        before = chaos_of(managed)
        if before is not None and before.chosen and before.seed != chaos:
            raise AlreadyManaged(f"pages of {managed._name} move by seed {before.seed} already: release() it first")
        if before is None or not before.chosen:
            move_pages(managed, chaos).chosen = True
    return managed


def chaos_of(managed: Managed) -> Chaos | None:
    """What moves pages of this model, and has counted them (`moved`, `reclaimed`, `seed`); None where nothing does."""
    from ..hooks.managed import forwards_of
    from .moves import PageMoves

    moves = forwards_of(managed).at_layer
    return moves.chaos if isinstance(moves, PageMoves) else None


def move_pages(managed: Managed, seed: int) -> Chaos:
    """Moves pages of a model at random from now on, and returns what draws them."""
    from ..hooks.managed import forwards_of
    from .moves import PageMoves

    moves = PageMoves(managed, seed)
    forwards_of(managed).at_layer = moves
    return moves.chaos
