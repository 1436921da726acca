"""The protocol by which the supervisor admits replicas, without I/O.

Note [Admission]
    A replica sends hello with a nonce. The supervisor answers with a nonce of its own and a proof for both that it
    knows the secret. The replica proves the same, with its fingerprint in the proof; as both nonces are new, nothing
    can be replayed. Then the supervisor compares the fingerprint, and assigns a member number, which was never used
    before. Other texts are not answered, and an unfinished exchange is dropped after a deadline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from .errors import JoinRefused, OtherModel, SecretRefused
from .fingerprint import Fingerprint
from .secret import nonce, proof, proves

JOIN_QUEUE: Final = "join"  # the supervisor's queue in the store
_SECRET: Final = "secret"
_MODEL: Final = "model"


@dataclass(frozen=True, slots=True)
class Reply:
    """A text for the `queue` of a joining replica. `admitted`: the member number and fingerprint, if it admits it."""

    queue: str
    text: str
    admitted: tuple[int, Fingerprint] | None = None


@dataclass(slots=True)
class AdmissionServer:
    """The supervisor's side. `served`: the fingerprint that all must have; None: that of the first replica. `within`:
    seconds that a replica has to answer."""

    secret: str
    served: Fingerprint | None
    clock: Callable[[], float]
    within: float
    ignored: int = 0  # texts that were no message of the protocol
    refused: int = 0
    _challenges: dict[str, tuple[str, float]] = field(default_factory=dict)  # replica's nonce: own nonce, deadline
    _next: int = 0

    def reply_to(self, text: str) -> Reply | None:
        """Returns the reply to a text of the join queue; None: no reply."""
        now = self.clock()
        self._challenges = {client: (said, until) for client, (said, until) in self._challenges.items() if until > now}
        try:
            said = json.loads(text)
            client = said["hello"]
            if not isinstance(client, str) or not client.isalnum():
                raise ValueError(client)
            return self._challenge(client) if "proof" not in said else self._decide(client, said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.ignored += 1
            return None

    def _challenge(self, client: str) -> Reply:
        mine = nonce()
        self._challenges[client] = mine, self.clock() + self.within
        return _reply(client, nonce=mine, proof=proof(self.secret, "supervisor", client, mine))

    def _decide(self, client: str, said: dict[str, Any]) -> Reply:
        mine, _ = self._challenges.pop(client, ("", 0.0))
        text = str(said["fingerprint"])
        if not mine or not proves(str(said["proof"]), self.secret, "replica", client, mine, text):
            self.refused += 1
            return _reply(client, refused=_SECRET)
        found = Fingerprint.decode(text)
        if self.served is None:
            self.served = found
        if differences := self.served.differences(found):
            self.refused += 1
            return _reply(client, refused=_MODEL, differences=differences)
        number, self._next = self._next, self._next + 1
        reply = _reply(client, member=number, proof=proof(self.secret, "admitted", client, str(number)))
        return Reply(reply.queue, reply.text, (number, found))


@dataclass(slots=True)
class AdmissionClient:
    """The side of a joining replica. `secret`: None if it has none."""

    secret: str | None
    fingerprint: Fingerprint
    id: str = field(default_factory=nonce)  # its nonce

    @property
    def queue(self) -> str:
        """The queue of the store in which the replies come."""
        return _queue(self.id)

    def hello(self) -> str:
        """Returns the first text. SecretRefused: there is no secret."""
        if not self.secret:
            raise SecretRefused("a supervisor admits only replicas with its secret, and none was given: give it")
        return json.dumps({"hello": self.id})

    def prove(self, text: str) -> str:
        """Returns the text that answers the first reply. SecretRefused: the supervisor has another secret."""
        said = json.loads(text)
        theirs, claimed = str(said.get("nonce", "")), str(said.get("proof", ""))
        if not proves(claimed, self.secret or "", "supervisor", self.id, theirs):
            raise SecretRefused(
                "the supervisor has another secret than this replica: give both the same one, or another address"
            )
        mine = self.fingerprint.encode()
        return json.dumps(
            {
                "hello": self.id,
                "fingerprint": mine,
                "proof": proof(self.secret or "", "replica", self.id, theirs, mine),
            }
        )

    def member(self, text: str) -> int:
        """Returns the member number in the second reply. OtherModel, SecretRefused, JoinRefused."""
        said = json.loads(text)
        if said.get("refused") == _SECRET:
            raise SecretRefused("the supervisor does not accept this replica's proof, or it came too late: try again")
        if said.get("refused") == _MODEL:
            raise OtherModel(tuple(map(str, said.get("differences", ()))))
        number = said.get("member")
        if not proves(str(said.get("proof", "")), self.secret or "", "admitted", self.id, str(number)):
            raise JoinRefused("what answered is not the supervisor: see who else reaches its port")
        return int(number)


def _queue(client: str) -> str:
    return f"{JOIN_QUEUE}/{client}"


def _reply(client: str, **said: object) -> Reply:
    return Reply(_queue(client), json.dumps(said))
